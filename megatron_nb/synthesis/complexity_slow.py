"""Statements and functions from n^2 to n! that labelled programs are composed of; read by complexity_pieces.py."""

SLOW = """
## bubble, n^2
$t = $a[:]
for $i in range($n):
    for $j in range($n - 1 - $i):
        if $t[$j] > $t[$j + 1]:
            $t[$j], $t[$j + 1] = $t[$j + 1], $t[$j]
$s += $t[0]
## insertion, n^2
$t = $a[:]
for $i in range(1, $n):
    $j = $i
    while $j > 0 and $t[$j - 1] > $t[$j]:
        $t[$j - 1], $t[$j] = $t[$j], $t[$j - 1]
        $j -= 1
$s += $t[0]
## grid, n^2
$t = [[0] * $n for $i in range($n)]
for $i in range(1, $n):
    for $j in range(1, $n):
        $t[$i][$j] = $t[$i - 1][$j] + 1
$s += $t[-1][-1]
## falling_loop, n^2: k falls by 1 with linear work, n^2
def $g($k):
    if $k == 0:
        return 0
    $t = 0
    for $i in range($k):
        $t += 1
    return $t + $g($k - 1)
--
$s += $g($n)
## slices, n^2
for $i in range($n):
    $s += sum($a[:$i])
## selection, n^2, held
$t = $a[:]
for $i in range($n):
    $k = $i
    for $j in range($i + 1, $n):
        if $t[$j] < $t[$k]:
            $k = $j
    $t[$i], $t[$k] = $t[$k], $t[$i]
$s += $t[0]
## matrix, n^3
$x = [[1] * $n for $i in range($n)]
$t = [[0] * $n for $i in range($n)]
for $i in range($n):
    for $j in range($n):
        for $k in range($n):
            $t[$i][$j] += $x[$i][$k] * $x[$k][$j]
$s += $t[0][0]
## paths, n^3, held
$t = [[$i + $j for $j in range($n)] for $i in range($n)]
for $k in range($n):
    for $i in range($n):
        for $j in range($n):
            $t[$i][$j] = min($t[$i][$j], $t[$i][$k] + $t[$k][$j])
$s += $t[0][-1]
## twice, 2^n: two calls of k - 1, 2^n
def $g($k):
    if $k == 0:
        return 1
    return $g($k - 1) + $g($k - 1)
--
$s += $g($n)
## subset_sum, 2^n: each item is taken or not, 2^n
def $g($k, $t):
    if $k == 0:
        return $t
    return $g($k - 1, $t) + $g($k - 1, $t + $k)
--
$s += $g($n, 0)
## mask_bits, 2^n
for $i in range(1 << $n):
    for $j in range($n):
        if $i >> $j & 1:
            $s += 1
## power_set, 2^n
$t = [0]
for $x in $a:
    $t = $t + [$y + 1 for $y in $t]
$s += len($t)
## hanoi, 2^n, held: two calls of k - 1, 2^n
def $g($k, $x, $y, $z):
    if $k == 0:
        return 0
    return $g($k - 1, $x, $z, $y) + 1 + $g($k - 1, $z, $y, $x)
--
$s += $g($n, 0, 1, 2)
## twice_loop, 2^n, held: two calls of k - 1, 2^n
def $g($k):
    if $k < 1:
        return 1
    $t = 0
    for $i in range(2):
        $t += $g($k - 1)
    return $t
--
$s += $g($n)
## factorial_calls, n!: k calls of k - 1, n!
def $g($k):
    if $k == 0:
        return 1
    $t = 0
    for $i in range($k):
        $t += $g($k - 1)
    return $t
--
$s += $g($n)
## orders, n!: k calls of k - 1, n!
def $g($b):
    if not $b:
        return 1
    $t = 0
    for $i in range(len($b)):
        $t += $g($b[:$i] + $b[$i + 1:])
    return $t
--
$s += $g($a)
## used, n!: k calls of k - 1, n!
def $g($k, $b):
    if len($b) == $k:
        return 1
    $t = 0
    for $i in range($k):
        if $i not in $b:
            $b.add($i)
            $t += $g($k, $b)
            $b.remove($i)
    return $t
--
$s += $g($n, set())
## swaps, n!, held: k calls of k - 1, n!
def $g($b, $k):
    if $k == len($b):
        return 1
    $t = 0
    for $i in range($k, len($b)):
        $b[$k], $b[$i] = $b[$i], $b[$k]
        $t += $g($b, $k + 1)
        $b[$k], $b[$i] = $b[$i], $b[$k]
    return $t
--
$s += $g($a, 0)
## factorial_sum, n!, held: k calls of k - 1, n!
def $g($k):
    return 1 if $k < 1 else sum($g($k - 1) for $i in range($k))
--
$s += $g($n)
"""
