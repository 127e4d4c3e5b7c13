#!/usr/bin/env bash
# math-verify 0.9.0 (latex2sympy2_extended 1.11.0): words and dates in \boxed{…}, as the questions of search agents have
# them, are arithmetic. A word is the product of its letters, so any order of them is equal: "Mary beat John" equals "John
# beat Mary", "no" equals "on". A date is a subtraction: 2023-01-05 equals 2017 and 2022-02-03, and the years 1990-2000
# equal 2000-2010. A time is a fraction: 12:30 equals 24:60. Only within \text{…} words are compared as words:
# \text{no} does not equal \text{on}. Nothing says which reading was taken.
# Expected: text that is no mathematics is compared as text, or not read at all.
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
    ("John beat Mary", "Mary beat John"), ("no", "on"), (r"\text{no}", r"\text{on}"),
    ("2023-01-05", "2017"), ("2023-01-05", "2022-02-03"), ("1990-2000", "2000-2010"), ("12:30", "24:60"),
):
    equal = verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}"))
    print(f"{gold} = {answer}: {equal}")
P
seen=$("$folder/venv/bin/python" "$folder/compare.py" 2>/dev/null)
printf '%s\n' "$seen"
expected='John beat Mary = Mary beat John: True
no = on: True
\text{no} = \text{on}: False
2023-01-05 = 2017: True
2023-01-05 = 2022-02-03: True
1990-2000 = 2000-2010: True
12:30 = 24:60: True'
[ "$seen" = "$expected" ] || { echo "changed"; exit 1; }
