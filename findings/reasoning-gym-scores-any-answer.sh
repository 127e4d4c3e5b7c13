#!/usr/bin/env bash
# reasoning-gym 0.1.25: in three data sets one constant answer, which is never right, has the full score of 1.0 on every
# question, or nearly, so a policy learns to write it. puzzle24 asks for 24 out of four given numbers, but its scorer does
# not look at these: any four in the range will do, as 6 + 6 + 6 + 6. coin_flip gives a wrong probability the share of its
# leading characters that match, of the shorter of both texts: "0" has all of its one character wherever the probability
# begins with "0.", as all do but those with an exponent. game_of_life_halting compares bool("True") with bool("False"):
# both are texts that are not empty, so every answer is right. countdown, which asks for an equation as puzzle24 does,
# compares the numbers.
# Expected: less than 1.0 for the answer to another question.
# Exit code: 0 as described, 1 changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25
cat > "$folder/score.py" <<'P'
import reasoning_gym

for name, constant in (
    ("puzzle24", "6 + 6 + 6 + 6"), ("coin_flip", "0"), ("game_of_life_halting", "perhaps"), ("countdown", "6 + 6 + 6 + 6"),
):
    data = reasoning_gym.create_dataset(name, size=50, seed=5)
    right = sum(entry["answer"] == constant for entry in data)
    scores = [data.score_answer(constant, entry) for entry in data]
    answers = len({entry["answer"] for entry in data})
    print(f"{name}: {answers} different answers, {constant!r} is {right} of 50, its mean score {sum(scores) / 50:.2f}")
P
seen=$("$folder/venv/bin/python" "$folder/score.py" 2>/dev/null | tail -4)
printf '%s\n' "$seen"
for name in puzzle24 coin_flip game_of_life_halting; do
  grep -qE "^.*$name: [0-9]+ different answers, '.*' is 0 of 50, its mean score (1.00|0.9[0-9])$" <<< "$seen" || { echo "changed"; exit 1; }
done
grep -qE "countdown: .* its mean score 0.0" <<< "$seen" || { echo "changed"; exit 1; }
