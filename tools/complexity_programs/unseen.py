"""The half that was written after the method was frozen."""

from __future__ import annotations

from tools.complexity_programs import GRAPH, INTS, MATRIX, NUMBER, SORTED, TEXT, TEXTS, Labelled

WORDS = """
import random
def make(n):
    return [[''.join(random.choices('abcdefghij', k=5)) for _ in range(n)]]
"""
POINTS = """
import random
def make(n):
    return [[(random.random(), random.random()) for _ in range(n)]]
"""
PERMUTATION = """
import random
def make(n):
    return [random.sample(range(n), n)]
"""
FEW = """
import random
def make(n):
    return [random.sample(range(100), n) if n < 100 else list(range(n)), 7]
"""
PROGRAMS = [
    Labelled("leap_year", "1", """
def f(y):
    return y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)
""", NUMBER),
    Labelled("middle_three", "1", """
def f(a):
    m = len(a) // 2
    return sorted([a[0], a[m], a[-1]])[1]
""", INTS),
    Labelled("count_bits", "log n", """
def f(n):
    c = 0
    while n > 0:
        c += n % 2
        n //= 2
    return c
""", NUMBER),
    Labelled("digit_sum_recursive", "log n", """
def f(n):
    return 0 if n == 0 else n % 10 + f(n // 10)
""", NUMBER),
    Labelled("first_bad", "log n", """
class Solution:
    def search(self, nums: List[int], target: int) -> int:
        def go(lo, hi):
            if lo >= hi:
                return lo
            mid = lo + (hi - lo) // 2
            return go(lo, mid) if nums[mid] >= target else go(mid + 1, hi)
        return go(0, len(nums))
""", SORTED, "search"),
    Labelled("matrix_power_fibonacci", "log n", """
def f(n):
    def mul(a, b, m=10**9 + 7):
        return [[sum(a[i][k] * b[k][j] for k in range(2)) % m for j in range(2)] for i in range(2)]
    r, b = [[1, 0], [0, 1]], [[1, 1], [1, 0]]
    while n:
        if n & 1:
            r = mul(r, b)
        b = mul(b, b)
        n >>= 1
    return r[0][1]
""", NUMBER),
    Labelled("perfect_number", "sqrt n", """
def f(n):
    total, d = 1, 2
    while d <= n // d:
        if n % d == 0:
            total += d + (n // d if d * d != n else 0)
        d += 1
    return total == n
""", NUMBER),
    Labelled("four_squares_lookup", "sqrt n", """
def f(n):
    root = int(n ** 0.5)
    squares = set()
    for i in range(root + 1):
        squares.add(i * i)
    return sum(1 for s in squares if n - s in squares)
""", NUMBER),
    Labelled("kadane", "n", """
def f(a):
    best = now = a[0]
    for x in a[1:]:
        now = max(x, now + x - 500000)
        best = max(best, now)
    return best
""", INTS),
    Labelled("anagram_counter", "n", """
def f(s, t):
    return Counter(s) == Counter(t)
""", TEXTS),
    Labelled("brackets_stack", "n", """
def f(s):
    pair = {'b': 'a', 'd': 'c'}
    stack = []
    for c in s:
        if c in pair:
            if stack and stack[-1] == pair[c]:
                stack.pop()
            else:
                stack.append(c)
        else:
            stack.append(c)
    return not stack
""", TEXT),
    Labelled("union_of_sets", "n", """
def f(a):
    evens = {x for x in a if x % 2 == 0}
    low = set(a[: len(a) // 2])
    return len(evens & low) + len(evens | low) - len(evens - low)
""", INTS),
    Labelled("run_lengths", "n", """
from itertools import groupby
def f(s):
    return ''.join(k + str(len(list(g))) for k, g in groupby(s))
""", TEXT),
    Labelled("tree_depth_iterative", "n", """
def f(n, edges):
    children = {}
    for a, b in edges[: n - 1]:
        children.setdefault(b, []).append(a)
    deepest, stack = 0, [(0, 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        stack.extend((c, depth + 1) for c in children.get(node, []))
    return deepest
""", GRAPH),
    Labelled("sliding_maximum", "n", """
def f(a):
    k, q, out = 50, deque(), []
    for i, x in enumerate(a):
        while q and a[q[-1]] <= x:
            q.pop()
        q.append(i)
        if q[0] <= i - k:
            q.popleft()
        if i >= k - 1:
            out.append(a[q[0]])
    return out
""", INTS),
    Labelled("cycle_count", "n", """
def f(p):
    seen, c = [False] * len(p), 0
    for i in range(len(p)):
        if not seen[i]:
            c += 1
            while not seen[i]:
                seen[i] = True
                i = p[i]
    return c
""", PERMUTATION),
    Labelled("knapsack_fixed_capacity", "n", """
def f(a):
    best = [0] * 101
    for x in a:
        w = x % 30 + 1
        for c in range(100, w - 1, -1):
            if best[c - w] + x > best[c]:
                best[c] = best[c - w] + x
    return best[100]
""", INTS),
    Labelled("quick_sort", "n log n", """
def f(a):
    if len(a) <= 1:
        return a
    p = a[len(a) // 2]
    return f([x for x in a if x < p]) + [x for x in a if x == p] + f([x for x in a if x > p])
""", INTS),
    Labelled("longest_increasing", "n log n", """
import bisect
def f(a):
    tails = []
    for x in a:
        i = bisect.bisect_left(tails, x)
        if i == len(tails):
            tails.append(x)
        else:
            tails[i] = x
    return len(tails)
""", """
import random
def make(n):
    return [[i + random.randrange(3) for i in range(n)]]
"""),
    Labelled("group_sorted_words", "n log n", """
def f(words):
    words.sort()
    return [w for i, w in enumerate(words) if i == 0 or w != words[i - 1]]
""", WORDS),
    Labelled("dijkstra_heap", "n log n", """
def f(n, edges):
    near = defaultdict(list)
    for i, (a, b) in enumerate(edges):
        near[a].append((b, i % 17 + 1))
        near[b].append((a, i % 17 + 1))
    dist, heap = {}, [(0, 0)]
    while heap:
        d, u = heappop(heap)
        if u in dist:
            continue
        dist[u] = d
        for v, w in near[u]:
            if v not in dist:
                heappush(heap, (d + w, v))
    return len(dist)
""", GRAPH),
    Labelled("fenwick_inversions", "n log n", """
def f(p):
    n, tree, c = len(p), [0] * (len(p) + 1), 0
    for i, x in enumerate(p):
        j, s = x + 1, 0
        while j > 0:
            s += tree[j]
            j -= j & -j
        c += i - s
        j = x + 1
        while j <= n:
            tree[j] += 1
            j += j & -j
    return c
""", PERMUTATION),
    Labelled("divisor_pairs_up_to", "n sqrt n", """
import math
def f(n):
    best = 0
    for k in range(1, n + 1):
        c = 0
        for d in range(1, math.isqrt(k) + 1):
            if k % d == 0:
                c += 2
        best = max(best, c)
    return best
""", NUMBER),
    Labelled("bubble_sort", "n^2", """
def f(a):
    a = list(a)
    for i in range(len(a)):
        for j in range(len(a) - 1 - i):
            if a[j] > a[j + 1]:
                a[j], a[j + 1] = a[j + 1], a[j]
    return a
""", INTS),
    Labelled("pop_front", "n^2", """
def f(a):
    queue, out = list(a), 0
    while queue:
        out ^= queue.pop(0)
    return out
""", INTS),
    Labelled("longest_common_memo", "n^2", """
def f(s, t):
    @lru_cache(maxsize=None)
    def go(i, j):
        if i == len(s) or j == len(t):
            return 0
        if s[i] == t[j]:
            return 1 + go(i + 1, j + 1)
        return max(go(i + 1, j), go(i, j + 1))
    return go(0, 0)
""", TEXTS),
    Labelled("closest_pair_naive", "n^2", """
from itertools import combinations
def f(points):
    return min((x0 - x1) ** 2 + (y0 - y1) ** 2 for (x0, y0), (x1, y1) in combinations(points, 2))
""", POINTS),
    Labelled("prepend_string", "n^2", """
def f(s):
    out = ''
    for c in s:
        out = c + out
    return out
""", TEXT),
    Labelled("count_each", "n^2", """
def f(a):
    return max(a, key=a.count)
""", INTS),
    Labelled("spiral_flood", "n^2", """
def f(grid):
    n, seen, regions = len(grid), set(), 0
    for i in range(n):
        for j in range(n):
            if (i, j) in seen or grid[i][j] % 2:
                continue
            regions += 1
            todo = [(i, j)]
            seen.add((i, j))
            while todo:
                r, c = todo.pop()
                for x, y in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
                    if 0 <= x < n and 0 <= y < n and (x, y) not in seen and grid[x][y] % 2 == 0:
                        seen.add((x, y))
                        todo.append((x, y))
    return regions
""", MATRIX),
    Labelled("sorted_rows", "n^2 log n", """
def f(grid):
    return [sorted(row)[len(row) // 2] for row in grid]
""", MATRIX),
    Labelled("heap_of_pairs", "n^2 log n", """
def f(a):
    heap = []
    for i in range(len(a)):
        for j in range(i + 1, len(a)):
            heappush(heap, a[i] * a[j])
    out = 0
    while heap:
        out ^= heappop(heap)
    return out
""", INTS),
    Labelled("matrix_product", "n^3", """
def f(m):
    columns = list(zip(*m))
    return [[sum(x * y for x, y in zip(row, col)) for col in columns] for row in m]
""", MATRIX),
    Labelled("matrix_chain", "n^3", """
def f(dims):
    n = len(dims) - 1
    best = [[0] * n for _ in range(n)]
    for length in range(2, n + 1):
        for i in range(n - length + 1):
            j = i + length - 1
            best[i][j] = min(
                best[i][k] + best[k + 1][j] + dims[i] * dims[k + 1] * dims[j + 1] for k in range(i, j)
            )
    return best[0][-1] if n else 0
""", INTS),
    Labelled("two_pair_sums", "n^k", """
def f(a):
    return sum(w + x == y + z for w in a for x in a for y in a for z in a)
""", INTS),
    Labelled("hanoi", "2^n", """
def f(n):
    moves = []
    def go(k, a, b, c):
        if k:
            go(k - 1, a, c, b)
            moves.append((a, c))
            go(k - 1, b, a, c)
    go(n, 'A', 'B', 'C')
    return len(moves)
""", NUMBER),
    Labelled("power_set_builtins", "2^n", """
from itertools import chain, combinations
def f(a):
    return max(sum(s) % 97 for s in chain.from_iterable(combinations(a, r) for r in range(len(a) + 1)))
""", INTS),
    Labelled("knapsack_recursion", "2^n", """
def f(a, k):
    def go(i, left):
        if i == len(a):
            return 0
        skip = go(i + 1, left)
        return max(skip, a[i] % 10 + go(i + 1, left - k))
    return go(0, 1000)
""", FEW),
    Labelled("travelling_salesman", "n!", """
from itertools import permutations
def f(m):
    n = len(m)
    best = float('inf')
    for order in permutations(range(1, n)):
        cost, at = 0, 0
        for city in order:
            cost += m[at][city]
            at = city
        best = min(best, cost + m[at][0])
    return best
""", MATRIX),
    Labelled("backtracking_arrangements", "n!", """
def f(a):
    used, count = [False] * len(a), 0
    def go(depth):
        nonlocal count
        if depth == len(a):
            count += 1
            return
        for i in range(len(a)):
            if not used[i]:
                used[i] = True
                go(depth + 1)
                used[i] = False
    go(0)
    return count
""", INTS),
]  # fmt: skip
