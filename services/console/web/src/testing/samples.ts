// Answers of the API that tests begin with.
import type { Model } from "../api/client";

export function makeRun(id: string, values: Partial<Model<"RunRow">> = {}): Model<"RunRow"> {
  return {
    id,
    state: "done",
    problem: null,
    is_latest: false,
    model: "tiny-policy",
    algorithm: "grpo",
    step: 40,
    total_steps: 40,
    started: 1_700_000_000,
    updated: 1_700_000_300,
    duration_s: 300,
    progress: { phase: "done", detail: "", done: 40, total: 40, left_s: null },
    em: null,
    best_em: null,
    best_label: null,
    reward: null,
    sparkline: [],
    notes: { note: "", tags: [] },
    ...values,
  };
}

/** A run that goes on: changes of makeRun. */
export const GOING: Partial<Model<"RunRow">> = {
  state: "running",
  step: 3,
  progress: { phase: "train", detail: "", done: 3, total: 40, left_s: 600 },
  em: { mean: 0.5, low: 0.4, high: 0.6, count: 100 },
};

export function makeDetail(changes: Partial<Model<"RunDetail">> = {}): Model<"RunDetail"> {
  return {
    run: makeRun("r", GOING),
    settings: { trainer: { lr: 0.1 } },
    changed: [],
    saved_steps: [2],
    validations: [],
    marks: [],
    warnings: [],
    metrics: ["reward_mean", "em_mean", "loss"],
    groups: [
      { title: "Reward", unit: "", curves: { reward_mean: "mean" } },
      { title: "Exact match of sampled answers", unit: "share", curves: { em_mean: "all sources" } },
    ],
    now: { em_mean: 0.25, reward_mean: 0.6, search_rate: null },
    restarts: {},
    summary: null,
    ...changes,
  };
}

export function makePoint(changes: Partial<Model<"QuestionPoint">> = {}): Model<"QuestionPoint"> {
  return {
    place: "before",
    row: 0,
    step: 0,
    kind: "validation",
    em: 0,
    reward: 0.2,
    answer: "Paris",
    samples: 1,
    ...changes,
  };
}

export function makeBlock(author: Model<"Author">, text: string): Model<"Block"> {
  return { author, begin: null, end: null, turn: null, pieces: [{ text, within: "", is_tag: false }] };
}
