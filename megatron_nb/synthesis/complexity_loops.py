"""Loops that labelled programs are composed of, by how often they run; read by complexity_pieces.py."""

LOOPS = """
## range, n, index
for $i in range($n):
    $BODY
## range_from_one, n, index
for $i in range(1, $n + 1):
    $BODY
## range_down, n, index
for $i in range($n - 1, -1, -1):
    $BODY
## range_by_two, n, index
for $i in range(0, $n, 2):
    $BODY
## items, n
for $x in $a:
    $BODY
## enumerate, n, index
for $i, $x in enumerate($a):
    $BODY
## while_up, n, index
$i = 0
while $i < $n:
    $BODY
    $i += 1
## while_down, n, index
$i = $n
while $i > 0:
    $i -= 1
    $BODY
## while_half, n, index
$i = 0
while $i < $n // 2:
    $BODY
    $i += 1
## two_ends, n, index
$i, $j = 0, $n - 1
while $i < $j:
    $BODY
    $i += 1
    $j -= 1
## range_len, n, index
for $i in range(len($a)):
    $BODY
## zip, n
for $x, $y in zip($a, $a):
    $BODY
## below, n, index
for $i in range($up):
    $BODY
## up_to, n, index
for $i in range($up + 1):
    $BODY
## above, n, index
for $i in range($up, $n):
    $BODY
## while_below, n, index
$i = $up
while $i > 0:
    $BODY
    $i -= 1
## reversed, n, index, held
for $i in reversed(range($n)):
    $BODY
## range_twice, n, held
for $i in range(2 * $n):
    $BODY
## while_by_three, n, index, held
$i = 0
while $i < $n:
    $BODY
    $i += 3
## while_negative, n, held
$i = -$n
while $i < 0:
    $BODY
    $i += 1
## after, n, index, held
for $i in range($up + 1, $n):
    $BODY
## halving, log n
$i = $n
while $i > 0:
    $BODY
    $i //= 2
## halving_first, log n
$i = $n
while $i > 1:
    $i = $i // 2
    $BODY
## doubling, log n
$i = 1
while $i < $n:
    $BODY
    $i *= 2
## thirds, log n
$i = $n
while $i >= 1:
    $BODY
    $i //= 3
## tripling, log n
$i = 1
while $i <= $n:
    $i *= 3
    $BODY
## bits, log n
for $i in range($n.bit_length()):
    $BODY
## digits, log n
for $c in str($n):
    $BODY
## shift_up, log n
$i = 1
while $i < $n:
    $i <<= 1
    $BODY
## search, log n
$lo, $hi = 0, $n
while $lo < $hi:
    $mid = ($lo + $hi) // 2
    $BODY
    if $mid % 2:
        $lo = $mid + 1
    else:
        $hi = $mid
## shift_down, log n, held
$i = $n
while $i:
    $BODY
    $i >>= 1
## doubling_sum, log n, held
$i = 1
while $i < $n:
    $BODY
    $i += $i
## fifths, log n, held
$i = $n
while $i > 0:
    $i //= 5
    $BODY
## square_below, sqrt n
$i = 1
while $i * $i <= $n:
    $BODY
    $i += 1
## root_power, sqrt n
for $i in range(int($n ** 0.5)):
    $BODY
## isqrt, sqrt n
for $i in range(math.isqrt($n) + 1):
    $BODY
## root_math, sqrt n
for $i in range(1, int(math.sqrt($n)) + 1):
    $BODY
## growing_steps, sqrt n
$i, $t = 0, 0
while $t < $n:
    $i += 1
    $t += $i
    $BODY
## square_up, sqrt n
$i = 0
while $i ** 2 < $n:
    $i += 1
    $BODY
## square_break, sqrt n
for $i in range(1, $n + 1):
    if $i * $i > $n:
        break
    $BODY
## root_down, sqrt n, held
$i = math.isqrt($n)
while $i > 0:
    $BODY
    $i -= 1
## divisors, sqrt n, held
$i = 2
while $i * $i <= $n:
    $i += 1
    $BODY
## harmonic, n log n
for $i in range(1, $n + 1):
    for $j in range($i, $n + 1, $i):
        $BODY
## harmonic_while, n log n
for $i in range(1, $n):
    $j = 0
    while $j < $n:
        $BODY
        $j += $i
## combinations, n^2
for $x, $y in itertools.combinations($a, 2):
    $BODY
## product, n^2
for $i, $j in itertools.product(range($n), repeat=2):
    $BODY
## square, n^2
for $i in range($n * $n):
    $BODY
## square_power, n^2, held
for $i in range($n ** 2):
    $BODY
## product_three, n^3
for $i, $j, $k in itertools.product(range($n), repeat=3):
    $BODY
## combinations_three, n^3, held
for $x, $y, $z in itertools.combinations($a, 3):
    $BODY
## cube, n^3
for $i in range($n ** 3):
    $BODY
## fourth, n^k
for $i in range($n ** 4):
    $BODY
## fixed, 1
for $i in range(12):
    $BODY
## letters, 1
for $c in 'abcdefgh':
    $BODY
## capped, 1
for $i in range(min($n, 9)):
    $BODY
## masks, 2^n
for $i in range(1 << $n):
    $BODY
## power_range, 2^n
for $i in range(2 ** $n):
    $BODY
## choices, 2^n
for $t in itertools.product((0, 1), repeat=$n):
    $BODY
## mask_up, 2^n
$i = 1
while $i < 1 << $n:
    $BODY
    $i += 1
## mask_while, 2^n, held
$i = 0
while $i < 2 ** $n:
    $BODY
    $i += 1
## mask_choices, 2^n, held
for $t in itertools.product([False, True], repeat=$n):
    $BODY
## permutations, n!
for $t in itertools.permutations($a):
    $BODY
## permutations_range, n!
for $t in itertools.permutations(range($n)):
    $BODY
## factorial_range, n!
for $i in range(math.factorial($n)):
    $BODY
## permutations_ones, n!, held
for $t in itertools.permutations(range(1, $n + 1)):
    $BODY
## factorial_while, n!, held
$i = math.factorial($n)
while $i > 0:
    $i -= 1
    $BODY
## square_ratio, sqrt n
$i = 1
while $i <= $n // $i:
    $BODY
    $i += 1
## odd_steps, sqrt n
$i, $t = 1, $n
while $t > 0:
    $t -= $i
    $i += 2
    $BODY
## root_range, sqrt n, held
for $i in range(2, math.isqrt($n) + 1):
    $BODY
## five, 1, held
for $i in range(5):
    $BODY
## fixed_while, 1
$i = 10
while $i > 0:
    $BODY
    $i -= 1
## three_letters, 1, held
for $c in 'xyz':
    $BODY
"""
