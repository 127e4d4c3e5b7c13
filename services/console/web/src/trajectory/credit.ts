// Why a trajectory was reinforced or punished, in sentences and sums, from its group's rewards.
import { formatNumber } from "../ui/format";

export interface Credit {
  /** Name in the settings; null where nothing is known, as in a validation. */
  estimator: string | null;
  /** Rewards of all samples of the group that have one, in order of samples. */
  rewards: readonly number[];
  /** The sample's own; null where it has none. */
  reward: number | null;
  /** What the estimator subtracted and divided by; null where it did not. */
  baseline: number | null;
  deviation: number | null;
  /** Null for validations. */
  trained: boolean | null;
  reason: string | null;
}

/** Formats a value with its sign; a value that rounds to 0 has none. */
export function formatSigned(value: number | null | undefined, digits = 3): string {
  const text = formatNumber(value, digits);
  return value !== null && value !== undefined && value > 0 ? `+${text}` : text;
}

export interface Method {
  title: string;
  formula: string;
  words: string;
}

/** What an estimator does, in words. */
export function describeEstimator(estimator: string | null, isScaled: boolean): Method {
  switch (estimator) {
    case "grpo":
      return isScaled
        ? {
            title: "GRPO",
            formula: "advantage = (reward − mean of the group) ÷ standard deviation of the group",
            words: "Every token of a sample gets the same advantage: how much better than its siblings the sample was.",
          }
        : {
            title: "Dr. GRPO",
            formula: "advantage = reward − mean of the group",
            words: "Every token of a sample gets the same advantage: how much better than its siblings the sample was.",
          };
    case "rloo":
      return {
        title: "RLOO",
        formula: "advantage = reward − mean of the other samples",
        words:
          "Every token of a sample gets the same advantage: its reward compared with that of all others of the group.",
      };
    case "grpo_multiturn":
      return {
        title: "Multi-turn GRPO",
        formula:
          "advantage = turn weight × (turn's reward compared with all turns of the group) + (reward compared with the group)",
        words: "A turn's own reward counts for its tokens alone, the rest of the reward for the whole sample.",
      };
    case "gae":
      return {
        title: "GAE",
        formula: "advantage = what came after the token − what the critic expected, scaled over the batch",
        words: "Tokens of one sample have different advantages; the critic's values are the baseline, not the group.",
      };
    case "reinforce_plus_plus":
      return {
        title: "REINFORCE++",
        formula: "advantage = rewards that follow the token, scaled over the batch",
        words: "The sample is compared with the whole batch, not with its group.",
      };
    default:
      return {
        title: estimator ?? "unknown",
        formula: "",
        words:
          estimator === null
            ? "The run does not say how advantages were made."
            : `How “${estimator}” makes advantages is its own.`,
      };
  }
}

/** What makes advantages from the rewards of a group alone. */
export function comparesGroup(estimator: string | null): boolean {
  return estimator === "grpo" || estimator === "rloo";
}

/** The sums behind one sample's advantage; null where the estimator does not compare rewards within the group. */
export function computeAdvantage(
  estimator: string | null,
  rewards: readonly number[],
  reward: number,
  baseline: number | null,
  deviation: number | null,
): { baseline: number; difference: number; advantage: number } | null {
  if (!comparesGroup(estimator) || rewards.length === 0) return null;
  const sum = rewards.reduce((total, one) => total + one, 0);
  if (estimator === "rloo") {
    if (rewards.length < 2) return null;
    const others = (sum - reward) / (rewards.length - 1);
    return { baseline: others, difference: reward - others, advantage: reward - others };
  }
  const mean = baseline ?? sum / rewards.length;
  const difference = reward - mean;
  if (deviation === null) return { baseline: mean, difference, advantage: difference };
  return { baseline: mean, difference, advantage: deviation === 0 ? 0 : difference / deviation };
}

/** Counts equal values: "3 got 1, 5 got 0", or the values themselves where most differ. */
export function describeRewards(rewards: readonly number[]): string {
  const counts = new Map<string, number>();
  for (const reward of rewards.toSorted((a, b) => b - a)) {
    const shown = formatNumber(reward, 3);
    counts.set(shown, (counts.get(shown) ?? 0) + 1);
  }
  if (counts.size <= 4) return join([...counts].map(([value, count]) => `${count} got ${value}`));
  const shown = rewards.toSorted((a, b) => b - a).map((reward) => formatNumber(reward, 3));
  return shown.length <= 8 ? shown.join(", ") : `from ${shown.at(-1) ?? ""} to ${shown[0] ?? ""}`;
}

function join(words: string[]): string {
  return words.length < 2 ? (words[0] ?? "") : `${words.slice(0, -1).join(", ")} and ${words.at(-1) ?? ""}`;
}

const EQUAL = 1e-9;

/** Explains the advantage of `what`, "This search" for instance, in one or two sentences. */
export function explainAdvantage(
  what: string,
  advantage: number | null,
  credit: Credit,
  value?: number | null,
): string {
  if (credit.trained === null) return "No advantage: a validation only measures, nothing is trained on it.";
  if (!credit.trained || advantage === null) {
    return `No advantage: the step did not train on this trajectory${credit.reason ? ` (${credit.reason})` : ""}.`;
  }
  const verb =
    Math.abs(advantage) < EQUAL ? "neither reinforced nor punished" : advantage > 0 ? "reinforced" : "punished";
  const result = `${what} was ${verb}: mean advantage ${formatSigned(advantage)}.`;
  return `${result} ${explainBaseline(credit, value ?? null)}`.trim();
}

function explainBaseline(credit: Credit, value: number | null): string {
  const { estimator, rewards, reward, baseline, deviation } = credit;
  switch (estimator) {
    case "gae":
      return value === null
        ? "The baseline is what the critic expected at each token."
        : `The baseline is what the critic expected: a return of ${formatNumber(value, 3)} on average over these tokens.`;
    case "reinforce_plus_plus":
      return "The baseline is the mean over the whole batch, not the group.";
  }
  if (reward === null || rewards.length === 0) return "";
  const sums = computeAdvantage(estimator, rewards, reward, baseline, deviation);
  const others = `Its trajectory got reward ${formatNumber(reward, 3)}; of the group's ${rewards.length} samples ${describeRewards(rewards)}`;
  const spread = Math.max(...rewards) - Math.min(...rewards);
  if (spread < EQUAL && comparesGroup(estimator)) return `${others}: all equal, so there is nothing to prefer.`;
  if (sums === null) return `${others}.`;
  if (estimator === "rloo") return `${others}; the others' mean is ${formatNumber(sums.baseline, 3)}.`;
  const scale = deviation === null ? "" : `, deviation ${formatNumber(deviation, 3)}`;
  return `${others} (mean ${formatNumber(sums.baseline, 3)}${scale}).`;
}
