#!/usr/bin/env bash
# math-verify 0.9.0 (latex2sympy2_extended 1.11.0): operators are dropped or changed without a warning. The degree sign is
# taken away before the function is applied, so \sin 30^\circ is the sine of 30 radians (-0.988): the accepted answer
# 8\sin 30^\circ is not 4, and it equals 8\sin 30. \lg 100 is 100, although \log 100 and \ln are read. 3!! is the factorial
# of 3! (720) and not the double factorial 3.
# Expected: 30 degrees where 30 degrees are written, the logarithm of ten, and the double factorial.
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
    (r"8\sin 30^\circ", "4"), (r"8\sin 30^\circ", r"8\sin 30"), (r"\cos 60^\circ", r"\frac{1}{2}"),
    (r"\log 100", "2"), (r"\lg 100", "2"), (r"\lg 100", "100"),
    ("3!!", "3"), ("3!!", "720"),
):
    print(f"{gold} = {answer}: {verify(parse(f'${gold}$'), parse(f'${answer}$'))}")
P
seen=$("$folder/venv/bin/python" "$folder/compare.py" 2>/dev/null)
printf '%s\n' "$seen"
expected='8\sin 30^\circ = 4: False
8\sin 30^\circ = 8\sin 30: True
\cos 60^\circ = \frac{1}{2}: False
\log 100 = 2: True
\lg 100 = 2: False
\lg 100 = 100: True
3!! = 3: False
3!! = 720: True'
[ "$seen" = "$expected" ] || { echo "changed"; exit 1; }
