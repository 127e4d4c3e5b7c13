#!/usr/bin/env bash
# verl 0.9.1, the reward of the data sources math, math_dapo and aime…: commas between digits are taken for those of thousands
# wherever they stand and after all spaces were removed, so "Answer: 3, 4" is 34, and has the full reward where 34 is right
# (an accepted answer 1,2 is 12). Of a line with dollar signs only the first pair counts: "$5$ or $7$" is right for 5, and so
# is "not $5$". The bar over repeating decimals is removed: 0.\overline{3} is 0.3. On the other hand "Answer: 34." and
# "**Answer**: 34" are wrong for 34. And gsm8k, of the same package, reads "#### 3/4" as 3 and finds "#### 18." wrong for 18.
# Expected: a list is no number, text beside the dollar signs counts, a full stop does not.
# Exit code: 0 as described, 1 changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.19.0 numpy==2.4.6 \
  accelerate==1.15.0 ray==2.60.0 tensordict==0.10.0 omegaconf==2.3.1 codetiming==1.4.0 dill==0.4.1 packaging psutil
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps verl==0.9.1  # what the rewards import is above
cat > "$folder/score.py" <<'P'
from verl.utils.reward_score import default_compute_score

for source, accepted, answer in (
    ("math_dapo", "34", "Answer: 3, 4"), ("math_dapo", "1,2", "Answer: 12"),
    ("math_dapo", "5", "Answer: $5$ or $7$"), ("math_dapo", "5", "Answer: not $5$"),
    ("math_dapo", "0.3", r"Answer: 0.\overline{3}"),
    ("math_dapo", "34", "Answer: 34."), ("math_dapo", "34", "**Answer**: 34"),
    ("openai/gsm8k", "3", "#### 3/4"), ("openai/gsm8k", "18", "#### 18."),
):
    score = default_compute_score(source, answer, accepted)
    score = score["score"] if isinstance(score, dict) else score
    print(f"{source}: {answer} for {accepted} is {'right' if score == 1 else 'wrong'}")
P
seen=$("$folder/venv/bin/python" "$folder/score.py" 2>/dev/null | grep -E "^(math_dapo|openai)")
printf '%s\n' "$seen"
expected='math_dapo: Answer: 3, 4 for 34 is right
math_dapo: Answer: 12 for 1,2 is right
math_dapo: Answer: $5$ or $7$ for 5 is right
math_dapo: Answer: not $5$ for 5 is right
math_dapo: Answer: 0.\overline{3} for 0.3 is right
math_dapo: Answer: 34. for 34 is wrong
math_dapo: **Answer**: 34 for 34 is wrong
openai/gsm8k: #### 3/4 for 3 is right
openai/gsm8k: #### 18. for 18 is wrong'
[ "$seen" = "$expected" ] || { echo "changed"; exit 1; }
