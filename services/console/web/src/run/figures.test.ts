import { describe, expect, it } from "vitest";
import type { Model } from "../api/client";
import { canBeLogarithmic, countNotPositive, listNames, listSteps, makeFigures, makeValidationSeries } from "./figures";

const estimate = (mean: number, count = 100) => ({ mean, low: mean - 0.1, high: mean + 0.1, count });

function validation(step: number, changes: Partial<Model<"ValidationRow">> = {}): Model<"ValidationRow"> {
  return {
    label: `step-${step}`,
    step,
    is_watch: false,
    em: estimate(0.5),
    em_by_source: {},
    failed: 0,
    count: 100,
    metrics: {},
    ...changes,
  };
}

const curves = {
  steps: [1, 2, 3],
  time: [null, null, null],
  columns: { em_mean: [0.1, null, 0.3], "seconds.wait": [1, 2, 3], "seconds.probe": [0, 0, 0] },
};

describe("figures", () => {
  const groups: Model<"CurveGroup">[] = [
    { title: "Exact match of sampled answers", unit: "share", curves: { em_mean: "all sources" } },
    { title: "Time", unit: "s", curves: { "seconds.wait": "wait", "seconds.probe": "probe" } },
  ];
  const validations = [validation(0, { em: estimate(0.2) }), validation(2), validation(2, { is_watch: true })];
  const x = listSteps(curves, validations);
  const figures = makeFigures(groups, ["unknown"], curves, validations, x);

  it("have the steps of validations, too", () => {
    expect(x).toEqual([0, 1, 2, 3]);
  });
  it("draw sampled and greedy exact match, and name both", () => {
    const [match] = figures;
    expect(match?.title).toBe("Exact match");
    expect(match?.series.map(({ label }) => label)).toEqual([
      "sampled, all sources",
      "greedy, validations",
      "greedy, watched questions",
    ]);
    expect(match?.series[0]?.values).toEqual([null, 0.1, null, 0.3]);
    expect(match?.series[1]?.values).toEqual([0.2, null, 0.5, null]);
    expect(match?.series[1]?.high?.[2]).toBeCloseTo(0.6);
    expect(match?.series.every(({ sparse, name }) => (sparse === true) === (name !== "em_mean"))).toBe(true);
  });
  it("stack times, without what takes none", () => {
    expect(figures[1]?.stacked).toBe(true);
    expect(figures[1]?.series.map(({ name }) => name)).toEqual(["seconds.wait"]);
  });
  it("show what else was asked for, also what the run lacks", () => {
    expect(figures[2]?.series[0]?.values).toEqual([null, null, null, null]);
  });
  it("need the metrics of all groups, each once", () => {
    expect(listNames(groups, ["em_mean", "loss"])).toEqual(["em_mean", "seconds.wait", "seconds.probe", "loss"]);
  });
});

describe("validations", () => {
  it("have a curve for each source, if there are several", () => {
    const rows = [validation(1, { em_by_source: { nq: estimate(0.3), trivia: estimate(0.7) } })];
    expect(makeValidationSeries(rows, [1]).map(({ label }) => label)).toEqual([
      "greedy, validations",
      "greedy, nq",
      "greedy, trivia",
    ]);
  });
  it("count by their questions where two are at one step", () => {
    const rows = [validation(1, { em: estimate(0.9, 1000) }), validation(1, { em: estimate(0.1, 10) })];
    expect(makeValidationSeries(rows, [1])[0]?.values).toEqual([0.9]);
  });
  it("without an exact match have no curve", () => {
    expect(makeValidationSeries([validation(1, { em: null })], [1])).toEqual([]);
  });
});

it("counts what a logarithmic axis cannot show", () => {
  expect(countNotPositive([{ name: "a", label: "a", values: [0, -1, null, 2] }])).toBe(2);
});

it("keeps a linear axis where no value is above 0, and for areas", () => {
  const figure = (value: number | null) => [{ name: "a", label: "a", values: [value, -1, 0] }];
  expect(canBeLogarithmic({ stacked: false, series: figure(0.1) })).toBe(true);
  expect(canBeLogarithmic({ stacked: false, series: figure(null) })).toBe(false);
  expect(canBeLogarithmic({ stacked: true, series: figure(0.1) })).toBe(false);
});
