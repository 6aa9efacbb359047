"""Written by someone who knew the ladder of classes and the form of these programs, but not the method of the witness."""

from __future__ import annotations

from tools.complexity_programs import INTS, MATRIX, NUMBER, Labelled

SHUFFLED = "import random\ndef make(n):\n    return [random.sample(range(n), n)]\n"
BACKWARDS = "def make(n):\n    return [list(range(n, 0, -1))]\n"
SIGNED = "import random\ndef make(n):\n    return [[random.randint(-10**6, 10**6) for _ in range(n)]]\n"
CENTRE = "def make(n):\n    return [n, n // 2, n // 2]\n"
LAST_OF_SORTED = "def make(n):\n    return [list(range(0, 3 * n, 3)), 3 * n - 3]\n"
LETTERS = "import random\ndef make(n):\n    return [''.join(random.choices('abcdefghijklmnopqrstuvwxyz', k=n))]\n"
ONES = "def make(n):\n    return [[[1] * n for _ in range(n)]]\n"
PRIME = """
def make(n):
    p = max(n, 2)
    while any(p % d == 0 for d in range(2, int(p ** 0.5) + 1)):
        p -= 1
    return [p]
"""
DAG = """
import random
def make(n):
    return [n, [[random.randrange(i), i] for i in range(1, n) for _ in range(2)]]
"""
SENTENCE = """
import random
def make(n):
    return [' '.join(''.join(random.choices('abcdefGH', k=3)) + random.choice(['', ',', '.']) for _ in range(n // 4 + 1))]
"""
STRIP = """
import random
def make(n):
    return [[[random.randrange(2) for _ in range(6)] for _ in range(n)]]
"""
TIMED = """
import random
def make(n):
    pairs = [(i, random.randrange(i)) for i in range(1, n)] + [(random.randrange(n), random.randrange(n)) for _ in range(n)]
    return [[[random.randrange(10**9), a, b] for a, b in pairs], n]
"""
RANGES = """
import random
def make(n):
    return [[random.randrange(n) for _ in range(n)], [sorted([random.randrange(n), random.randrange(n)]) for _ in range(n)]]
"""
WEIGHTS = "import random\ndef make(n):\n    return [[[random.randint(1, 999) for _ in range(n)] for _ in range(n)]]\n"
GAINS = "import random\ndef make(n):\n    return [[[random.randint(-50, 50) for _ in range(n)] for _ in range(n)]]\n"
POINTS = """
import random
def make(n):
    return [[[x, random.randrange(10 * n)] for x in random.sample(range(10 * n), n)]]
"""
WITH_TARGET = "import random\ndef make(n):\n    return [[random.randrange(1000) for _ in range(n)], 2000]\n"
FRIENDS = "import random\ndef make(n):\n    return [n, [[i, random.randrange(i)] for i in range(1, n) for _ in range(2)]]\n"
PROGRAMS = [
    Labelled("day_of_week", "1", """
def f(n):
    year, month, day = 1900 + n, 3, 14
    k, j = year % 100, year // 100
    h = (day + 13 * (month + 1) // 5 + k + k // 4 + j // 4 + 5 * j) % 7
    return ['Sat', 'Sun', 'Mon', 'Tue', 'Wed', 'Thu', 'Fri'][h]
""", NUMBER),
    Labelled("knight_moves", "1", """
def f(n, row, col):
    steps = [(1, 2), (2, 1), (-1, 2), (-2, 1), (1, -2), (2, -1), (-1, -2), (-2, -1)]
    return sum(1 for dr, dc in steps if 0 <= row + dr < n and 0 <= col + dc < n)
""", CENTRE),
    Labelled("median_of_three", "1", """
def f(nums):
    candidates = [nums[0], nums[len(nums) // 2], nums[-1]]
    return sorted(candidates)[1] + max(nums[:3], key=lambda x: -x)
""", INTS),
    Labelled("range_arithmetic", "1", """
def f(n):
    r = range(3, 10 * n, 7)
    return n in r, len(r), r[-1], sum(r[:4]), next(reversed(r)) - r[len(r) // 2]
""", NUMBER),
    Labelled("josephus_halves", "log n", """
def f(n):
    if n <= 1:
        return 1
    return 2 * f(n // 2) + (1 if n % 2 else -1)
""", NUMBER),
    Labelled("peak_element", "log n", """
from typing import List

class Solution:
    def findPeakElement(self, nums: List[int]) -> int:
        left, right = 0, len(nums) - 1
        while left < right:
            mid = (left + right) // 2
            if nums[mid] > nums[mid + 1]:
                right = mid
            else:
                left = mid + 1
        return left
""", SHUFFLED, "findPeakElement"),
    Labelled("geometric_sum", "log n", """
MOD = 10**9 + 7

def solve(r, n):
    if n == 0:
        return 0, 1
    total, power = solve(r, n // 2)
    total, power = total * (1 + power) % MOD, power * power % MOD
    if n & 1:
        total, power = (total + power) % MOD, power * r % MOD
    return total, power

def f(n):
    return solve(3, n)[0]
""", NUMBER),
    Labelled("factorise_prime", "sqrt n", """
def f(n):
    factors = {}
    d = 2
    while d * d <= n:
        while n % d == 0:
            factors[d] = factors.get(d, 0) + 1
            n //= d
        d += 1
    if n > 1:
        factors[n] = factors.get(n, 0) + 1
    return sorted(factors.items())
""", PRIME),
    Labelled("two_square_ways", "sqrt n", """
import math

def f(n):
    rests = (n - a * a for a in range(math.isqrt(n) + 1))
    return sum(1 for r in rests if math.isqrt(r) ** 2 == r)
""", NUMBER),
    Labelled("divisor_sum_blocks", "sqrt n", """
def f(n):
    total, left = 0, 1
    while left <= n:
        q = n // left
        right = n // q
        total += q * (right - left + 1)
        left = right + 1
    return total
""", NUMBER),
    Labelled("jump_search", "sqrt n", """
import math

def f(arr, target):
    n = len(arr)
    step = max(1, int(math.sqrt(n)))
    prev, end = 0, step
    while end < n and arr[end - 1] < target:
        prev, end = end, end + step
    for i in range(prev, min(end, n)):
        if arr[i] == target:
            return i
    return -1
""", LAST_OF_SORTED),
    Labelled("course_order", "n", """
from collections import defaultdict, deque

def f(n, edges):
    graph = defaultdict(list)
    indegree = [0] * n
    for a, b in edges:
        graph[a].append(b)
        indegree[b] += 1
    queue = deque(i for i in range(n) if indegree[i] == 0)
    order = []
    while queue:
        node = queue.popleft()
        order.append(node)
        for nxt in graph[node]:
            indegree[nxt] -= 1
            if indegree[nxt] == 0:
                queue.append(nxt)
    return order if len(order) == n else []
""", DAG),
    Labelled("most_common_word", "n", """
def f(text):
    cleaned = ''.join(c if c.isalpha() else ' ' for c in text.lower())
    counts = {}
    for word in cleaned.split():
        counts[word] = counts.get(word, 0) + 1
    return max(counts, key=counts.get)
""", SENTENCE),
    Labelled("tree_diameter", "n", """
class TreeNode:
    def __init__(self, val):
        self.val = val
        self.left = None
        self.right = None

class Solution:
    def build(self, values, i):
        if i >= len(values):
            return None
        node = TreeNode(values[i])
        node.left = self.build(values, 2 * i + 1)
        node.right = self.build(values, 2 * i + 2)
        return node

    def diameter(self, values):
        best = 0
        def depth(node):
            nonlocal best
            if not node:
                return 0
            left, right = depth(node.left), depth(node.right)
            best = max(best, left + right)
            return 1 + max(left, right)
        depth(self.build(values, 0))
        return best
""", INTS, "diameter"),
    Labelled("longest_consecutive", "n", """
def f(nums):
    numbers = set(nums)
    longest = 0
    for x in numbers:
        if x - 1 not in numbers:
            length = 1
            while x + length in numbers:
                length += 1
            longest = max(longest, length)
    return longest
""", SHUFFLED),
    Labelled("islands_in_strip", "n", """
def f(grid):
    rows, cols = len(grid), len(grid[0])
    seen = set()
    count = 0
    for r in range(rows):
        for c in range(cols):
            if grid[r][c] == 0 or (r, c) in seen:
                continue
            count += 1
            stack = [(r, c)]
            seen.add((r, c))
            while stack:
                x, y = stack.pop()
                for nx, ny in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                    if 0 <= nx < rows and 0 <= ny < cols and grid[nx][ny] == 1 and (nx, ny) not in seen:
                        seen.add((nx, ny))
                        stack.append((nx, ny))
    return count
""", STRIP),
    Labelled("connect_ropes", "n log n", """
import heapq

def f(lengths):
    heap = list(lengths)
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        cost += joined
        heapq.heappush(heap, joined)
    return cost
""", INTS),
    Labelled("earliest_friends", "n log n", """
class DSU:
    def __init__(self, n):
        self.parent = list(range(n))
        self.rank = [0] * n
        self.groups = n

    def find(self, x):
        if self.parent[x] != x:
            self.parent[x] = self.find(self.parent[x])
        return self.parent[x]

    def union(self, a, b):
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        if self.rank[a] < self.rank[b]:
            a, b = b, a
        self.parent[b] = a
        self.rank[a] += self.rank[a] == self.rank[b]
        self.groups -= 1

def f(logs, n):
    dsu = DSU(n)
    for time, a, b in sorted(logs, key=lambda log: log[0]):
        dsu.union(a, b)
        if dsu.groups == 1:
            return time
    return -1
""", TIMED),
    Labelled("largest_number", "n log n", """
from functools import cmp_to_key

def f(nums):
    def compare(a, b):
        if a + b > b + a:
            return -1
        return 1 if a + b < b + a else 0
    words = sorted(map(str, nums), key=cmp_to_key(compare))
    result = ''.join(words)
    return '0' if result[0] == '0' else result
""", INTS),
    Labelled("sparse_table", "n log n", """
def f(nums):
    table = [nums]
    width = 1
    while 2 * width <= len(nums):
        prev = table[-1]
        table.append([min(x, y) for x, y in zip(prev, prev[width:])])
        width *= 2
    return [row[-1] for row in table]
""", INTS),
    Labelled("counts_in_range", "n log n", """
from bisect import bisect_left, bisect_right

def f(nums):
    ordered = sorted(nums)
    return max(bisect_right(ordered, x + 5000) - bisect_left(ordered, x - 5000) for x in nums)
""", INTS),
    Labelled("perfect_squares", "n sqrt n", """
def f(n):
    dp = [0] + [float('inf')] * n
    for i in range(1, n + 1):
        j = 1
        while j * j <= i:
            dp[i] = min(dp[i], dp[i - j * j] + 1)
            j += 1
    return dp[n]
""", NUMBER),
    Labelled("mo_distinct", "n sqrt n", """
def f(a, queries):
    block = max(1, int(len(a) ** 0.5))
    order = sorted(range(len(queries)), key=lambda q: (queries[q][0] // block, queries[q][1]))
    counts = {}
    answers = [0] * len(queries)
    left, right = 0, -1
    for q in order:
        l, r = queries[q]
        while right < r:
            right += 1
            counts[a[right]] = counts.get(a[right], 0) + 1
        while left > l:
            left -= 1
            counts[a[left]] = counts.get(a[left], 0) + 1
        while right > r:
            counts[a[right]] -= 1
            if counts[a[right]] == 0:
                del counts[a[right]]
            right -= 1
        while left < l:
            counts[a[left]] -= 1
            if counts[a[left]] == 0:
                del counts[a[left]]
            left += 1
        answers[q] = len(counts)
    return answers
""", RANGES),
    Labelled("palindromic_subsequence", "n^2", """
import sys

sys.setrecursionlimit(10**6)

def f(s):
    memo = {}
    def longest(i, j):
        if i >= j:
            return int(i == j)
        if (i, j) not in memo:
            if s[i] == s[j]:
                memo[i, j] = 2 + longest(i + 1, j - 1)
            else:
                memo[i, j] = max(longest(i + 1, j), longest(i, j - 1))
        return memo[i, j]
    return longest(0, len(s) - 1)
""", LETTERS),
    Labelled("three_sum", "n^2", """
from typing import List

class Solution:
    def threeSum(self, nums: List[int]) -> List[List[int]]:
        nums.sort()
        result = []
        for i in range(len(nums) - 2):
            if i > 0 and nums[i] == nums[i - 1]:
                continue
            left, right = i + 1, len(nums) - 1
            while left < right:
                total = nums[i] + nums[left] + nums[right]
                if total < 0:
                    left += 1
                elif total > 0:
                    right -= 1
                else:
                    result.append([nums[i], nums[left], nums[right]])
                    left += 1
                    right -= 1
        return result
""", SIGNED, "threeSum"),
    Labelled("dense_dijkstra", "n^2", """
def f(weights):
    n = len(weights)
    dist = [float('inf')] * n
    dist[0] = 0
    unvisited = set(range(n))
    while unvisited:
        u = min(unvisited, key=lambda v: dist[v])
        unvisited.remove(u)
        for v in unvisited:
            dist[v] = min(dist[v], dist[u] + weights[u][v])
    return max(dist)
""", WEIGHTS),
    Labelled("least_rotation", "n^2", """
def f(s):
    return min(s[i:] + s[:i] for i in range(len(s)))
""", LETTERS),
    Labelled("insertion_sort", "n^2", """
def f(nums):
    arr = nums[:]
    for i in range(1, len(arr)):
        key = arr[i]
        j = i - 1
        while j >= 0 and arr[j] > key:
            arr[j + 1] = arr[j]
            j -= 1
        arr[j + 1] = key
    return arr
""", BACKWARDS),
    Labelled("points_on_line", "n^2 log n", """
def f(points):
    best = 1
    for i, (x, y) in enumerate(points):
        slopes = sorted((v - y) / (u - x) for j, (u, v) in enumerate(points) if j != i)
        run = 1
        for k in range(len(slopes)):
            run = run + 1 if k and slopes[k] == slopes[k - 1] else 2
            best = max(best, run)
    return best
""", POINTS),
    Labelled("increasing_from_each_start", "n^2 log n", """
def longest(nums, start):
    tails = []
    for i in range(start, len(nums)):
        lo, hi = 0, len(tails)
        while lo < hi:
            mid = (lo + hi) // 2
            if tails[mid] < nums[i]:
                lo = mid + 1
            else:
                hi = mid
        tails[lo:lo + 1] = [nums[i]]
    return len(tails)

def f(nums):
    return [longest(nums, start) for start in range(len(nums))]
""", INTS),
    Labelled("burst_balloons", "n^3", """
import sys

sys.setrecursionlimit(10**5)

def f(nums):
    a = [1] + nums + [1]
    memo = {}
    def best(left, right):
        if left + 1 == right:
            return 0
        if (left, right) in memo:
            return memo[left, right]
        result = 0
        for k in range(left + 1, right):
            result = max(result, best(left, k) + best(k, right) + a[left] * a[k] * a[right])
        memo[left, right] = result
        return result
    return best(0, len(a) - 1)
""", "import random\ndef make(n):\n    return [[random.randint(1, 100) for _ in range(n)]]\n"),
    Labelled("largest_submatrix", "n^3", """
def f(grid):
    rows, cols = len(grid), len(grid[0])
    best = grid[0][0]
    for top in range(rows):
        sums = [0] * cols
        for bottom in range(top, rows):
            current = 0
            for c in range(cols):
                sums[c] += grid[bottom][c]
                current = max(sums[c], current + sums[c])
                best = max(best, current)
    return best
""", GAINS),
    Labelled("determinant_by_elimination", "n^3", """
MOD = 1_000_000_007

def f(matrix):
    m = [row[:] for row in matrix]
    n, det = len(m), 1
    for c in range(n):
        pivot = next((r for r in range(c, n) if m[r][c]), None)
        if pivot is None:
            return 0
        if pivot != c:
            m[c], m[pivot] = m[pivot], m[c]
            det = -det
        det = det * m[c][c] % MOD
        inverse = pow(m[c][c], MOD - 2, MOD)
        for r in range(c + 1, n):
            factor = m[r][c] * inverse % MOD
            m[r] = [(x - factor * y) % MOD for x, y in zip(m[r], m[c])]
    return det % MOD
""", MATRIX),
    Labelled("four_sum_combinations", "n^k", """
from itertools import combinations

def f(nums, target):
    return sum(1 for four in combinations(nums, 4) if sum(four) == target)
""", WITH_TARGET),
    Labelled("squares_of_ones", "n^k", """
def f(grid):
    n = len(grid)
    count = 0
    for i in range(n):
        for j in range(n):
            for size in range(1, n - max(i, j) + 1):
                if all(grid[i + x][j + y] for x in range(size) for y in range(size)):
                    count += 1
    return count
""", ONES),
    Labelled("parentheses_generator", "2^n", """
def build(text, opened, closed, n):
    if len(text) == 2 * n:
        yield text
        return
    if opened < n:
        yield from build(text + '(', opened + 1, closed, n)
    if closed < opened:
        yield from build(text + ')', opened, closed + 1, n)

def f(n):
    return list(build('', 0, 0, n))
""", NUMBER),
    Labelled("held_karp", "2^n", """
from functools import lru_cache

def f(dist):
    n = len(dist)
    @lru_cache(maxsize=None)
    def visit(mask, last):
        if mask == (1 << n) - 1:
            return dist[last][0]
        return min(dist[last][nxt] + visit(mask | 1 << nxt, nxt) for nxt in range(n) if not mask >> nxt & 1)
    return visit(1, 0)
""", WEIGHTS),
    Labelled("max_cut", "2^n", """
from itertools import product

def f(n, edges):
    best = 0
    for side in product((0, 1), repeat=n):
        best = max(best, sum(side[a] != side[b] for a, b in edges))
    return best
""", FRIENDS),
    Labelled("queens_by_permutations", "n!", """
from itertools import permutations

def f(n):
    rows = range(n)
    return sum(
        len({p[i] + i for i in rows}) == n and len({p[i] - i for i in rows}) == n for p in permutations(rows)
    )
""", NUMBER),
    Labelled("determinant_by_minors", "n!", """
def f(matrix):
    if len(matrix) == 1:
        return matrix[0][0]
    total = 0
    for c in range(len(matrix)):
        minor = [row[:c] + row[c + 1:] for row in matrix[1:]]
        total += (-1) ** c * matrix[0][c] * f(minor)
    return total
""", MATRIX),
]  # fmt: skip
