// What the colours behind tokens mean: values of a mode, the scale that fits them, and the class of each token.
import { formatNumber } from "../ui/format";
import type { Model } from "../api/client";

export type Tokens = Model<"TokenColumns">;
export type Values = (number | null)[];

type Kind = "author" | "mask" | "diverging" | "sequential" | "whole";

export interface Mode {
  id: string;
  label: string;
  /** The key that chooses it. */
  key: string;
  kind: Kind;
  /** What a value means, for the legend. */
  meaning: string;
  /** Why a trajectory may lack it. */
  missing: string;
  read: (tokens: Tokens, stepVersion: number | null) => Values | null;
}

const UNTRAINED = "the step did not train on this trajectory";

export const MODES = [
  {
    id: "author",
    label: "Author",
    key: "1",
    kind: "author",
    meaning: "who wrote a text",
    missing: "",
    read: () => null,
  },
  {
    id: "advantage",
    label: "Advantage",
    key: "2",
    kind: "diverging",
    meaning: "how much a token was reinforced (above 0) or punished (below 0)",
    missing: UNTRAINED,
    read: (tokens) => tokens.advantage,
  },
  {
    id: "mask",
    label: "Mask",
    key: "3",
    kind: "mask",
    meaning: "tokens that the step trained on",
    missing: "",
    read: (tokens) => tokens.mask,
  },
  {
    id: "version",
    label: "Version",
    key: "4",
    kind: "whole",
    meaning: "policy version that sampled a token",
    missing: "the versions were not recorded",
    read: (tokens) => tokens.version,
  },
  {
    id: "staleness",
    label: "Staleness",
    key: "5",
    kind: "whole",
    meaning: "optimizer steps between sampling a token and training on it",
    missing: "no step trained on this trajectory",
    read: (tokens, stepVersion) =>
      stepVersion === null ? null : tokens.version.map((version) => (version === null ? null : stepVersion - version)),
  },
  {
    id: "mismatch",
    label: "Mismatch",
    key: "6",
    kind: "diverging",
    meaning: "log-probability of the trainer minus that of the engine, for the same weights ideally 0",
    missing: UNTRAINED,
    read: (tokens) => tokens.mismatch,
  },
  {
    id: "kl",
    label: "KL",
    key: "7",
    kind: "sequential",
    meaning: "distance from the reference policy, k3 estimate",
    missing: "the step had no reference policy",
    read: (tokens) => tokens.kl,
  },
  {
    id: "entropy",
    label: "Entropy",
    key: "8",
    kind: "sequential",
    meaning: "how undecided the policy was before the token",
    missing: "the step did not record the entropy of each token",
    read: (tokens) => tokens.entropy,
  },
  {
    id: "surprise",
    label: "Log-prob",
    key: "9",
    kind: "sequential",
    meaning: "minus the trainer's log-probability: strong where the token was unlikely",
    missing: UNTRAINED,
    read: (tokens) => tokens.log_prob?.map((value) => (value === null ? null : -value)) ?? null,
  },
  {
    id: "value",
    label: "Value",
    key: "0",
    kind: "diverging",
    meaning: "return that the critic expected",
    missing: "only PPO has a critic, and this step had none",
    read: (tokens) => tokens.value,
  },
  {
    id: "return",
    label: "Return",
    key: "-",
    kind: "diverging",
    meaning: "what the estimator made of the rewards that follow",
    missing: UNTRAINED,
    read: (tokens) => tokens.returns,
  },
  {
    id: "reward",
    label: "Reward",
    key: "=",
    kind: "diverging",
    meaning: "reward at the token, after the KL penalty where that is part of the reward",
    missing: UNTRAINED,
    read: (tokens) => tokens.reward,
  },
] as const satisfies readonly Mode[];

export type ModeId = (typeof MODES)[number]["id"];
export const MODE_IDS = MODES.map(({ id }) => id);
export const DEFAULT_MODE: ModeId = "author";

export function findMode(id: ModeId): Mode {
  return MODES.find((mode) => mode.id === id) ?? MODES[0];
}

/** Whether the trajectory has what a mode shows. */
export function isAvailable(mode: Mode, tokens: Tokens | null, stepVersion: number | null): boolean {
  if (mode.kind === "author") return true;
  if (tokens === null) return false;
  return mode.read(tokens, stepVersion)?.some((value) => value !== null) ?? false;
}

/** Steps on each side of 0, and of a scale without a middle; trajectory.css has a class for each. */
export const SIDE_LEVELS = 8;
export const LEVELS = 5;

export interface Scale {
  kind: Kind;
  /** The values with the faintest and the strongest colour; of a diverging scale -high and high. */
  low: number;
  high: number;
  /** Tokens beyond `high`, which have the colour of `high`; so one outlier does not make all others pale. */
  beyond: number;
  /** Tokens with a value. */
  count: number;
}

const OUTLIER = 3;

/** Fits a scale to the values of one or more trajectories. */
export function fitScale(kind: Kind, columns: readonly Values[]): Scale {
  const sizes: number[] = [];
  let low = Infinity;
  let high = -Infinity;
  for (const values of columns) {
    for (const value of values) {
      if (value === null || Number.isNaN(value)) continue;
      sizes.push(Math.abs(value));
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  const count = sizes.length;
  if (count === 0) return { kind, low: 0, high: 0, beyond: 0, count };
  if (kind === "whole" || kind === "mask") return { kind, low, high, beyond: 0, count };
  sizes.sort((a, b) => a - b);
  const largest = sizes[count - 1] ?? 0;
  const usual = sizes[Math.ceil(0.99 * count) - 1] ?? 0;
  const end = usual > 0 && largest > OUTLIER * usual ? usual : largest;
  const beyond = sizes.reduce((sum, size) => sum + Number(size > end), 0);
  return { kind, low: kind === "diverging" ? -end : 0, high: end, beyond, count };
}

/** The class that colours a value; "" where there is none. */
export function chooseClass(scale: Scale, value: number | null): string {
  if (value === null || Number.isNaN(value)) return "";
  switch (scale.kind) {
    case "author":
      return "";
    case "mask":
      return value > 0 ? "on" : "off";
    case "diverging": {
      const level = scale.high === 0 ? 0 : Math.round(Math.min(1, Math.abs(value) / scale.high) * SIDE_LEVELS);
      return level === 0 ? "zero" : `${value > 0 ? "plus" : "minus"}-${level}`;
    }
    case "sequential":
    case "whole": {
      const width = scale.high - scale.low;
      const share = width === 0 ? 0 : Math.min(1, Math.max(0, (value - scale.low) / width));
      return `level-${scale.kind === "whole" ? Math.round(share * (LEVELS - 1)) : Math.min(LEVELS - 1, Math.floor(share * LEVELS))}`;
    }
  }
}

/** The class of each token under a mode. */
export function colourTokens(scale: Scale, values: Values | null): string[] {
  return values?.map((value) => chooseClass(scale, value)) ?? [];
}

export interface Swatch {
  className: string;
  label: string;
}

/** The swatches of a legend, from low to high; those between the labelled ones have no label. */
export function listSwatches(scale: Scale): Swatch[] {
  const show = (value: number) => `${value > 0 && scale.kind === "diverging" ? "+" : ""}${formatNumber(value, 3)}`;
  switch (scale.kind) {
    case "author":
      return [];
    case "mask":
      return [
        { className: "on", label: "trained on" },
        { className: "off", label: "not trained on" },
      ];
    case "diverging": {
      if (scale.high === 0) return [{ className: "zero", label: "0" }];
      const levels = Array.from({ length: SIDE_LEVELS / 2 }, (_, place) => 2 * (place + 1));
      return [
        ...levels.toReversed().map((level) => ({ className: `minus-${level}`, label: "" })),
        { className: "zero", label: "0" },
        ...levels.map((level) => ({ className: `plus-${level}`, label: "" })),
      ].map((swatch, place, all) =>
        place === 0
          ? { ...swatch, label: show(-scale.high) }
          : place === all.length - 1
            ? { ...swatch, label: show(scale.high) }
            : swatch,
      );
    }
    case "whole": {
      const steps = scale.high - scale.low;
      if (steps < LEVELS)
        return Array.from({ length: steps + 1 }, (_, place) => ({
          className: chooseClass(scale, scale.low + place),
          label: String(scale.low + place),
        }));
      return spread(scale, String(scale.low), String(scale.high));
    }
    case "sequential":
      return spread(scale, show(scale.low), show(scale.high));
  }
}

function spread(scale: Scale, low: string, high: string): Swatch[] {
  if (scale.low === scale.high) return [{ className: "level-0", label: low }];
  return Array.from({ length: LEVELS }, (_, level) => ({
    className: `level-${level}`,
    label: level === 0 ? low : level === LEVELS - 1 ? high : "",
  }));
}
