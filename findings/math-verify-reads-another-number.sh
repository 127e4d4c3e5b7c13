#!/usr/bin/env bash
# math-verify 0.9.0 (latex2sympy2_extended 1.11.0): some plain ways to write a number are read, without an error or a
# warning, as another number. The digits under the bar of a repeating decimal are lost, so 0.\overline{3} is 0: it equals 0
# and 0.\overline{6}, and not 1/3. The base of 1001_2 is lost, so it equals 1001_3 and not 9. Digits that a thin space
# separates, 12\,345, are multiplied and added to 357. And 1e-7 is 1 as text and e - 7 as LaTeX. As a reward this pays for
# 0 where the accepted answer is 0.\overline{3}, and pays nothing for 1/3.
# Expected: the number that is written, or nothing (an empty list, as for other text that it cannot read).
# Exit code: 0 as described, 1 changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
cat > "$folder/compare.py" <<'P'
from math_verify import parse, verify

for gold, answer in (
    (r"$0.\overline{3}$", r"$\frac{1}{3}$"), (r"$0.\overline{3}$", "$0$"), (r"$0.\overline{3}$", r"$0.\overline{6}$"),
    ("$1001_2$", "$9$"), ("$1001_2$", "$1001_3$"),
    (r"$12\,345$", "$12345$"), (r"$12\,345$", "$357$"),
    ("$10^{-7}$", "1e-7"), ("$1$", "1e-7"), ("$e-7$", "$1e-7$"),
):
    print(f"{gold} = {answer}: {verify(parse(gold), parse(answer))}")
P
seen=$("$folder/venv/bin/python" "$folder/compare.py" 2>/dev/null)
printf '%s\n' "$seen"
expected='$0.\overline{3}$ = $\frac{1}{3}$: False
$0.\overline{3}$ = $0$: True
$0.\overline{3}$ = $0.\overline{6}$: True
$1001_2$ = $9$: False
$1001_2$ = $1001_3$: True
$12\,345$ = $12345$: False
$12\,345$ = $357$: True
$10^{-7}$ = 1e-7: False
$1$ = 1e-7: True
$e-7$ = $1e-7$: True'
[ "$seen" = "$expected" ] || { echo "changed"; exit 1; }
