"""Statements and functions up to n log n that labelled programs are composed of; read by complexity_pieces.py."""

LEAVES = """
## formula, 1
$s += $n * ($n + 1) // 2
## parity, 1
if $n % 2 == 0:
    $s += $n // 2
else:
    $s += 3 * $n + 1
## table, 1
$t = {0: 4, 1: 9, 2: 25}
$s += $t[$n % 3]
## middle, 1
if $n > 2:
    $s += ($a[0] + $a[$n // 2] + $a[-1]) // 3
## clamp, 1, held
$s = max(0, min($s + $n, 4096))
## ends, 1, held
$x, $y = $a[0], $a[-1]
$s += $x if $x < $y else $y
## bisect, log n
$s += bisect.bisect_left($a, $s)
## bisect_right, log n, held
$s += bisect.bisect_right($a, $n)
## half_recursion, log n: each call halves k, log n
def $g($k):
    if $k <= 1:
        return 0
    return 1 + $g($k // 2)
--
$s += $g($n)
## power, log n: each call halves k, log n
def $g($x, $k):
    if $k == 0:
        return 1
    $t = $g($x, $k // 2)
    $t = $t * $t % 10007
    return $t * $x % 10007 if $k % 2 else $t
--
$s += $g(3, $n)
## third_recursion, log n, held: each call halves k, log n
def $g($k):
    return 1 if $k < 3 else $g($k // 3) + 1
--
$s += $g($n)
## root_function, sqrt n
def $g($k):
    $i = 2
    while $i * $i <= $k:
        $i += 1
    return $i
--
$s += $g($n)
## sum, n
$s += sum($a)
## max, n
$s += max($a)
## set, n
$s += len(set($a))
## missing, n
if -1 in $a:
    $s += 1
## list_count, n
$s += $a.count(3)
## comprehension, n
$t = [$x * 2 for $x in $a]
$s += len($t)
## generator, n
$s += sum($x % 3 for $x in $a)
## filter, n
$s += len([$x for $x in range($n) if $x % 4 == 1])
## tally, n
$t = {}
for $x in $a:
    $t[$x] = $t.get($x, 0) + 1
$s += len($t)
## prefix, n
$t = [0]
for $x in $a:
    $t.append($t[-1] + $x)
$s += $t[-1]
## linear_recursion, n: k falls by 1 in each call, n
def $g($k):
    if $k == 0:
        return 0
    return 1 + $g($k - 1)
--
$s += $g($n)
## tree_recursion, n: two halves with constant work, n
def $g($lo, $hi):
    if $hi - $lo <= 1:
        return 1
    $mid = ($lo + $hi) // 2
    return $g($lo, $mid) + $g($mid, $hi)
--
$s += $g(0, $n)
## queue, n
$t = collections.deque([0])
while $t:
    $x = $t.popleft()
    $s += 1
    if $x + 1 < $n:
        $t.append($x + 1)
## min, n, held
$s += min($a)
## any, n, held
if any($x < 0 for $x in $a):
    $s += 1
## stack, n, held: each item is pushed and popped once, n
$t = []
for $x in $a:
    while $t and $t[-1] > $x:
        $t.pop()
    $t.append($x)
$s += len($t)
## sorted, n log n
$t = sorted($a)
$s += $t[0]
## sort, n log n
$t = $a[:]
$t.sort()
$s += $t[-1]
## sort_key, n log n
$t = sorted($a, key=lambda $x: -$x)
$s += $t[0]
## heap, n log n
$t = []
for $x in $a:
    heapq.heappush($t, -$x)
while $t:
    $s -= heapq.heappop($t)
## halves_loop, n log n: two halves with linear work, n log n
def $g($k):
    if $k <= 1:
        return 1
    $t = 0
    for $i in range($k):
        $t += 1
    return $t + $g($k // 2) + $g($k // 2)
--
$s += $g($n)
## merge_sort, n log n: two halves with linear work, n log n
def $g($b):
    if len($b) < 2:
        return $b
    $k = len($b) // 2
    $x, $y, $t = $g($b[:$k]), $g($b[$k:]), []
    $i = $j = 0
    while $i < len($x) and $j < len($y):
        if $x[$i] <= $y[$j]:
            $t.append($x[$i])
            $i += 1
        else:
            $t.append($y[$j])
            $j += 1
    return $t + $x[$i:] + $y[$j:]
--
$s += $g($a)[0]
## sorted_reverse, n log n, held
$t = sorted($a, reverse=True)
$s += $t[-1]
## halves_sum, n log n, held: two halves with linear work, n log n
def $g($b):
    if len($b) < 2:
        return 1
    $k = len($b) // 2
    return sum($b) % 7 + $g($b[:$k]) + $g($b[$k:])
--
$s += $g($a)
"""
