"""The half that the method was developed by."""

from __future__ import annotations

from tools.complexity_programs import DISTINCT, GRAPH, INTS, MATRIX, NUMBER, SORTED, TEXT, TEXTS, Labelled

PRIME = """
def make(n):
    p = max(n, 2)
    while any(p % d == 0 for d in range(2, min(p, 2000)) if d * d <= p) or (p > 4e6 and pow(2, p - 1, p) != 1):
        p += 1
    return [p]
"""
PROGRAMS = [
    Labelled("first_and_last", "1", """
def f(a):
    return (a[0] + a[-1]) * 2 + len(a)
""", INTS),
    Labelled("triangle_number", "1", """
def f(n):
    s = 0
    for i in range(10):
        s += i * n
    return n * (n + 1) // 2 + s
""", NUMBER),
    Labelled("dict_lookup", "1", """
def f(a):
    d = {'x': 1, 'y': 2}
    return d.get('x', 0) + d['y'] + a[len(a) // 2]
""", INTS),
    Labelled("binary_search", "log n", """
def f(a, t):
    lo, hi = 0, len(a)
    while lo < hi:
        m = (lo + hi) // 2
        if a[m] < t:
            lo = m + 1
        else:
            hi = m
    return lo
""", SORTED),
    Labelled("bisect_call", "log n", """
import bisect
def f(a, t):
    i = bisect.bisect_left(a, t)
    return i < len(a) and a[i] == t
""", SORTED),
    Labelled("fast_power", "log n", """
def f(n):
    r, b = 1, 3
    while n:
        if n & 1:
            r = r * b % 1000000007
        b = b * b % 1000000007
        n >>= 1
    return r
""", NUMBER),
    Labelled("euclid", "log n", """
def f(a, b):
    while b:
        a, b = b, a % b
    return a
""", """
import random
def make(n):
    return [n, random.randrange(n // 2, n) + 1]
"""),
    Labelled("trial_division", "sqrt n", """
def f(n):
    i = 2
    while i * i <= n:
        if n % i == 0:
            return False
        i += 1
    return True
""", PRIME),
    Labelled("divisors", "sqrt n", """
import math
def f(n):
    out = []
    for i in range(1, math.isqrt(n) + 1):
        if n % i == 0:
            out.append(i)
            if i != n // i:
                out.append(n // i)
    return sorted(out)
""", NUMBER),
    Labelled("loop_max", "n", """
def f(a):
    m = a[0]
    for x in a:
        if x > m:
            m = x
    return m
""", INTS),
    Labelled("builtin_sums", "n", """
def f(a):
    return sum(a) + max(a) - min(a)
""", INTS),
    Labelled("two_sum", "n", """
def f(a):
    seen = {}
    for i, x in enumerate(a):
        if -1 - x in seen:
            return [seen[-1 - x], i]
        seen[x] = i
    return []
""", INTS),
    Labelled("palindrome", "n", """
def f(s):
    return s == s[::-1] or s.lower().replace('a', 'b').count('b') > 3
""", TEXT),
    Labelled("memo_stairs", "n", """
from functools import lru_cache
@lru_cache(None)
def g(k):
    return 1 if k < 2 else (g(k - 1) + g(k - 2)) % 1000007
def f(n):
    for i in range(n):
        g(i)
    return g(n)
""", NUMBER),
    Labelled("bfs", "n", """
from collections import deque
def f(n, edges):
    near = [[] for _ in range(n)]
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
    dist = [-1] * n
    dist[0] = 0
    q = deque([0])
    while q:
        u = q.popleft()
        for v in near[u]:
            if dist[v] < 0:
                dist[v] = dist[u] + 1
                q.append(v)
    return max(dist)
""", GRAPH),
    Labelled("join_words", "n", """
def f(s):
    return ' '.join(w.capitalize() for w in s.split('a'))
""", TEXT),
    Labelled("merge_sort", "n log n", """
def f(a):
    if len(a) < 2:
        return a
    m = len(a) // 2
    l, r = f(a[:m]), f(a[m:])
    out, i, j = [], 0, 0
    while i < len(l) and j < len(r):
        if l[i] < r[j]:
            out.append(l[i]); i += 1
        else:
            out.append(r[j]); j += 1
    return out + l[i:] + r[j:]
""", INTS),
    Labelled("builtin_sort", "n log n", """
def f(a):
    b = sorted(a)
    t = 0
    for x, y in zip(b, b[1:]):
        t = max(t, y - x)
    return t
""", INTS),
    Labelled("heap_sort", "n log n", """
import heapq
def f(a):
    h = []
    for x in a:
        heapq.heappush(h, x)
    out = []
    while h:
        out.append(heapq.heappop(h))
    return out
""", INTS),
    Labelled("harmonic", "n log n", """
def f(n):
    count = [0] * (n + 1)
    for i in range(1, n + 1):
        for j in range(i, n + 1, i):
            count[j] += 1
    return max(count)
""", NUMBER),
    Labelled("interval_sweep", "n log n", """
class Solution:
    def merge(self, spans):
        spans.sort(key=lambda s: s[0])
        out = []
        for a, b in spans:
            if out and a <= out[-1][1]:
                out[-1][1] = max(out[-1][1], b)
            else:
                out.append([a, b])
        return len(out)
""", """
import random
def make(n):
    return [[sorted([random.randrange(10**6), random.randrange(10**6)]) for _ in range(n)]]
""", "merge"),
    Labelled("root_blocks", "n sqrt n", """
def f(a):
    n = len(a)
    b = int(n ** 0.5) + 1
    sums = [sum(a[i:i + b]) for i in range(0, n, b)]
    t = 0
    for r in range(n):
        s = 0
        for k in range(r // b):
            s += sums[k]
        t ^= s
    return t
""", INTS),
    Labelled("primes_by_division", "n sqrt n", """
def f(n):
    total = 0
    for k in range(1, n):
        d = 1
        while d * d <= k:
            total += k % d
            d += 1
    return total
""", NUMBER),
    Labelled("nested_pairs", "n^2", """
def f(a):
    c = 0
    for i in range(len(a)):
        for j in range(i):
            c += a[j] < a[i]
    return c
""", INTS),
    Labelled("in_list", "n^2", """
def f(a):
    seen = []
    for x in a:
        if x not in seen:
            seen.append(x)
    return len(seen)
""", DISTINCT),
    Labelled("insert_front", "n^2", """
def f(a):
    out = []
    for x in a:
        out.insert(0, x)
    return out
""", INTS),
    Labelled("slices", "n^2", """
def f(s):
    best = 0
    for i in range(len(s)):
        t = s[i:]
        best = max(best, t.count('a'))
    return best
""", TEXT),
    Labelled("edit_distance", "n^2", """
def f(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        new = [i]
        for j, y in enumerate(b, 1):
            new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (x != y)))
        row = new
    return row[-1]
""", TEXTS),
    Labelled("transpose", "n^2", """
def f(m):
    return [list(r) for r in zip(*m)]
""", MATRIX),
    Labelled("sort_in_loop", "n^2 log n", """
def f(a):
    t = 0
    for i in range(len(a)):
        t += sorted(a)[i]
    return t
""", INTS),
    Labelled("bisect_pairs", "n^2 log n", """
from bisect import bisect_left
def f(a):
    a = sorted(a)
    t = 0
    for i in range(len(a)):
        for j in range(i):
            t += bisect_left(a, a[i] - a[j])
    return t
""", INTS),
    Labelled("floyd", "n^3", """
def f(d):
    n = len(d)
    for k in range(n):
        for i in range(n):
            for j in range(n):
                if d[i][k] + d[k][j] < d[i][j]:
                    d[i][j] = d[i][k] + d[k][j]
    return d[0][-1]
""", MATRIX),
    Labelled("triples", "n^3", """
from itertools import combinations
def f(a):
    c = 0
    for x, y, z in combinations(a, 3):
        c += x + y == z
    return c
""", INTS),
    Labelled("all_substrings_reversed", "n^3", """
def f(s):
    c = 0
    for i in range(len(s)):
        for j in range(i + 1, len(s) + 1):
            t = s[i:j]
            c += t == t[::-1]
    return c
""", TEXT),
    Labelled("quadruples", "n^k", """
def f(a):
    n, c = len(a), 0
    for i in range(n):
        for j in range(i):
            for k in range(j):
                for l in range(k):
                    c += a[i] + a[j] == a[k] + a[l]
    return c
""", INTS),
    Labelled("naive_fibonacci", "2^n", """
def f(n):
    return n if n < 2 else f(n - 1) + f(n - 2)
""", NUMBER),
    Labelled("subset_masks", "2^n", """
def f(a):
    best = 0
    for m in range(1 << len(a)):
        s = 0
        for i in range(len(a)):
            if m >> i & 1:
                s += a[i]
        best = max(best, s % 1000)
    return best
""", INTS),
    Labelled("subset_recursion", "2^n", """
def f(a):
    out = []
    def go(i, chosen):
        if i == len(a):
            out.append(chosen[:])
            return
        go(i + 1, chosen)
        chosen.append(a[i])
        go(i + 1, chosen)
        chosen.pop()
    go(0, [])
    return len(out)
""", INTS),
    Labelled("permutations", "n!", """
from itertools import permutations
def f(a):
    return min(sum(p[::2]) for p in permutations(a))
""", INTS),
    Labelled("permute_by_hand", "n!", """
def f(a):
    out = []
    def go(rest, chosen):
        if not rest:
            out.append(chosen)
        for i in range(len(rest)):
            go(rest[:i] + rest[i + 1:], chosen + [rest[i]])
    go(a, [])
    return len(out)
""", INTS),
]  # fmt: skip
