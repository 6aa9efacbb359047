"""Written after the method was mended for what the unseen half showed."""

from __future__ import annotations

from tools.complexity_programs import DISTINCT, GRAPH, INTS, MATRIX, NUMBER, SORTED, TEXT, TEXTS, Labelled

DENSE = """
import random
def make(n):
    return [n, [(i, j, random.randrange(1000)) for i in range(n) for j in range(i)]]
"""
WORDS = """
import random
def make(n):
    return [[''.join(random.choices('abcdefghij', k=6)) for _ in range(n)]]
"""
PROGRAMS = [
    Labelled("swap_ends", "1", """
def f(a):
    a[0], a[-1] = a[-1], a[0]
    return a[0] ^ a[-1]
""", INTS),
    Labelled("clock_angle", "1", """
def f(n):
    h, m = divmod(n, 60)
    angle = abs(30 * (h % 12) + m / 2 - 6 * m)
    return min(angle, 360 - angle)
""", NUMBER),
    Labelled("ternary_digits", "log n", """
def f(n):
    out = []
    while n:
        n, r = divmod(n, 3)
        out.append(str(r))
    return ''.join(reversed(out)) or '0'
""", NUMBER),
    Labelled("insertion_point_builtin", "log n", """
def f(a, t):
    return bisect_right(a, t) - bisect_left(a, t)
""", SORTED),
    Labelled("integer_root", "log n", """
def f(n):
    lo, hi = 0, n
    while lo < hi:
        mid = (lo + hi + 1) // 2
        if mid * mid <= n:
            lo = mid
        else:
            hi = mid - 1
    return lo
""", NUMBER),
    Labelled("closest_factors", "sqrt n", """
def f(n):
    for d in range(int(n ** 0.5), 0, -1):
        pass
    return [d for d in range(1, int(n ** 0.5) + 1) if n % d == 0][-1]
""", NUMBER),
    Labelled("triangular_steps", "sqrt n", """
def f(n):
    step, total = 0, 0
    while total < n:
        step += 1
        total += step
    return step
""", NUMBER),
    Labelled("prefix_sums_xor", "n", """
from itertools import accumulate
def f(a):
    sums = list(accumulate(a))
    seen = {0: -1}
    best = 0
    for i, s in enumerate(sums):
        key = s % 1000
        best = max(best, i - seen.setdefault(key, i))
    return best
""", INTS),
    Labelled("caesar", "n", """
def f(s):
    table = {c: chr((ord(c) - 97 + 3) % 26 + 97) for c in 'abcdefghijklmnopqrstuvwxyz'}
    out = ''
    for c in s:
        out += table[c]
    return out[::-1].upper()
""", TEXT),
    Labelled("prefix_function", "n", """
def f(s):
    p = [0] * len(s)
    for i in range(1, len(s)):
        j = p[i - 1]
        while j and s[i] != s[j]:
            j = p[j - 1]
        p[i] = j + (s[i] == s[j])
    return p[-1]
""", TEXT),
    Labelled("components_union_find", "n", """
def f(n, edges):
    parent = list(range(n))
    def find(x):
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x
    size = [1] * n
    for a, b in edges:
        a, b = find(a), find(b)
        if a != b:
            if size[a] < size[b]:
                a, b = b, a
            parent[b] = a
            size[a] += size[b]
    return len({find(x) for x in range(n)})
""", GRAPH),
    Labelled("coin_ways_fixed", "n", """
def f(n):
    ways = [1] + [0] * n
    for c in (1, 5, 10, 25):
        for k in range(c, n + 1):
            ways[k] = (ways[k] + ways[k - c]) % 1000007
    return ways[n]
""", NUMBER),
    Labelled("frequency_buckets", "n", """
def f(words):
    counts = defaultdict(int)
    for w in words:
        counts[w[0]] += 1
    return [k for k, v in counts.items() if v == max(counts.values())]
""", WORDS),
    Labelled("water_container", "n", """
class Solution:
    def maxArea(self, height: List[int]) -> int:
        i, j, best = 0, len(height) - 1, 0
        while i < j:
            best = max(best, (j - i) * min(height[i], height[j]))
            if height[i] < height[j]:
                i += 1
            else:
                j -= 1
        return best
""", INTS, "maxArea"),
    Labelled("kth_by_sorting", "n log n", """
def f(a):
    a = list(a)
    a.sort(reverse=True)
    return a[len(a) // 3]
""", INTS),
    Labelled("meeting_rooms", "n log n", """
def f(a):
    ends = []
    for s in sorted(a):
        e = s + 5000
        if ends and ends[0] <= s:
            heapq.heapreplace(ends, e)
        else:
            heapq.heappush(ends, e)
    return len(ends)
""", DISTINCT),
    Labelled("build_tree_queries", "n log n", """
def f(a):
    n = 1
    while n < len(a):
        n *= 2
    tree = [0] * n + a + [0] * (n - len(a))
    for i in range(n - 1, 0, -1):
        tree[i] = max(tree[2 * i], tree[2 * i + 1])
    total = 0
    for i in range(len(a)):
        k = n + i
        while k > 1:
            k //= 2
            total ^= tree[k]
    return total
""", INTS),
    Labelled("divide_and_conquer_maximum", "n log n", """
def f(a):
    def go(lo, hi):
        if hi - lo == 1:
            return a[lo]
        mid = (lo + hi) // 2
        left = right = -10**9
        s = 0
        for i in range(mid - 1, lo - 1, -1):
            s += a[i] - 500000
            left = max(left, s)
        s = 0
        for i in range(mid, hi):
            s += a[i] - 500000
            right = max(right, s)
        return max(left + right, go(lo, mid), go(mid, hi))
    return go(0, len(a))
""", INTS),
    Labelled("strided_sums", "n sqrt n", """
def f(a):
    root = int(len(a) ** 0.5)
    return max(sum(a[s::k]) for k in range(1, root + 1) for s in range(k))
""", INTS),
    Labelled("selection_sort", "n^2", """
def f(a):
    for i in range(len(a)):
        j = min(range(i, len(a)), key=a.__getitem__)
        a[i], a[j] = a[j], a[i]
    return a
""", INTS),
    Labelled("pairs_in_set", "n^2", """
def f(a):
    have = set(a)
    return sum(1 for x in a for y in a if x + y in have)
""", INTS),
    Labelled("palindromes_around", "n^2", """
def f(s):
    n = len(s)
    ok = [[False] * n for _ in range(n)]
    count = 0
    for i in range(n - 1, -1, -1):
        for j in range(i, n):
            ok[i][j] = s[i] == s[j] and (j - i < 2 or ok[i + 1][j - 1])
            count += ok[i][j]
    return count
""", TEXT),
    Labelled("tuple_accumulation", "n^2", """
def f(a):
    seen = ()
    for x in a:
        seen = seen + (x,)
    return len(seen)
""", INTS),
    Labelled("unique_by_index", "n^2", """
def f(a):
    return [x for x in a if a.index(x) >= 0 and a.count(x) == 1]
""", DISTINCT),
    Labelled("rotate_and_sum", "n^2", """
def f(m):
    turned = [list(row)[::-1] for row in zip(*m)]
    return sum(map(sum, turned)) + max(max(r) for r in turned)
""", MATRIX),
    Labelled("kruskal_dense", "n^2 log n", """
def f(n, edges):
    parent = list(range(n))
    def find(x):
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x
    total = 0
    for a, b, w in sorted(edges, key=lambda e: e[2]):
        ra, rb = find(a), find(b)
        if ra != rb:
            parent[ra] = rb
            total += w
    return total
""", DENSE),
    Labelled("median_of_prefixes", "n^2 log n", """
def f(a):
    return [sorted(a[: i + 1])[i // 2] for i in range(len(a))]
""", INTS),
    Labelled("three_sum_sets", "n^3", """
def f(a):
    n, count = len(a), 0
    for i in range(n):
        for j in range(i + 1, n):
            count += -(a[i] + a[j]) in a[j + 1:]
    return count
""", INTS),
    Labelled("transitive_closure", "n^3", """
def f(m):
    n = len(m)
    reach = [[v > 90 for v in row] for row in m]
    for k in range(n):
        for i in range(n):
            row_k = reach[k]
            reach[i] = [a or (reach[i][k] and b) for a, b in zip(reach[i], row_k)]
    return sum(map(sum, reach))
""", MATRIX),
    Labelled("submatrix_sums", "n^k", """
def f(m):
    n, best = len(m), 0
    for top in range(n):
        for bottom in range(top, n):
            for left in range(n):
                for right in range(left, n):
                    best = max(best, m[top][left] - m[bottom][right])
    return best
""", MATRIX),
    Labelled("gray_codes", "2^n", """
def f(n):
    codes = ['']
    for _ in range(n):
        codes = ['0' + c for c in codes] + ['1' + c for c in reversed(codes)]
    return len(set(codes))
""", NUMBER),
    Labelled("interleavings_no_memo", "2^n", """
def f(s, t):
    def go(i, j):
        if i == len(s) or j == len(t):
            return 0
        return max(go(i + 1, j), go(i, j + 1)) + (s[i] == t[j])
    return go(0, 0)
""", TEXTS),
    Labelled("orderings_of_rest", "n!", """
def f(a):
    def go(rest):
        if len(rest) <= 1:
            return 1
        return sum(go(rest[:i] + rest[i + 1:]) for i in range(len(rest)))
    return go(tuple(a))
""", INTS),
    Labelled("best_ordering", "n!", """
def f(a):
    return max(permutations(a), key=lambda p: sum(i * x for i, x in enumerate(p)) % 1009)
""", INTS),
]  # fmt: skip
