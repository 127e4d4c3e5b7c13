import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { makeDetail } from "../testing/trajectories";
import { chooseClass, colourTokens, findMode, fitScale, isAvailable, listSwatches, MODES } from "./colours";

const { tokens } = makeDetail();
if (tokens === null) throw new Error("the example has tokens");

describe("a diverging scale", () => {
  test("has 0 in its middle, whatever the values", () => {
    const scale = fitScale("diverging", [[0.2, 0.4, 1]]);
    expect([scale.low, scale.high]).toEqual([-1, 1]);
    expect(chooseClass(scale, 0)).toBe("zero");
    expect(chooseClass(scale, 1)).toBe("plus-8");
    expect(chooseClass(scale, -1)).toBe("minus-8");
    expect(chooseClass(scale, 0.5)).toBe("plus-4");
  });

  test("is not made pale by one outlier, and says how many lie beyond it", () => {
    const values = [...Array.from({ length: 999 }, (_, n) => (n % 2 === 0 ? 0.1 : -0.1)), 50];
    const scale = fitScale("diverging", [values]);
    expect(scale.high).toBe(0.1);
    expect(scale.beyond).toBe(1);
    expect(chooseClass(scale, 50)).toBe("plus-8");
  });

  test("keeps an outlier where most values are 0", () => {
    expect(fitScale("diverging", [[...Array<number>(999).fill(0), 3]]).high).toBe(3);
  });

  test("is shared by several trajectories", () => {
    expect(fitScale("diverging", [[1], [-4, null]]).high).toBe(4);
  });
});

test("values that are all 0, or none at all, give no colour but that of 0", () => {
  expect(chooseClass(fitScale("diverging", [[0, 0]]), 0)).toBe("zero");
  expect(chooseClass(fitScale("diverging", [[]]), null)).toBe("");
  expect(chooseClass(fitScale("sequential", [[0, 0]]), 0)).toBe("level-0");
  expect(chooseClass(fitScale("diverging", [[1]]), Number.NaN)).toBe("");
});

test("versions have a colour each while there are few, in order", () => {
  const scale = fitScale("whole", [[8, 9, 10, null]]);
  expect(listSwatches(scale).map(({ label }) => label)).toEqual(["8", "9", "10"]);
  expect(colourTokens(scale, [8, 9, 10, null])).toEqual(["level-0", "level-2", "level-4", ""]);
  expect(listSwatches(fitScale("whole", [[3, 40]])).map(({ label }) => label)).toEqual(["3", "", "", "", "40"]);
});

test("staleness is the step's version minus the token's", () => {
  expect(findMode("staleness").read(tokens, 9)).toEqual([1, 1, 1, null, null, null, 0, 0, 0]);
  expect(isAvailable(findMode("staleness"), tokens, null)).toBe(false);
});

test("modes without values are not available, and validations have authors alone", () => {
  const available = (given: typeof tokens | null) =>
    MODES.filter((mode) => isAvailable(mode, given, 9)).map(({ id }) => id);
  expect(available(null)).toEqual(["author"]);
  expect(available(tokens)).not.toContain("entropy");
  expect(available(tokens)).not.toContain("value");
  expect(available({ ...tokens, value: Array<null>(9).fill(null) })).not.toContain("value");
});

test("each mode has a key of its own", () => {
  expect(new Set(MODES.map(({ key }) => key)).size).toBe(MODES.length);
});

describe("every class of a swatch has a colour", () => {
  const css = readFileSync(`${import.meta.dirname}/trajectory.css`, "utf8");
  const scales = [
    fitScale("mask", [[0, 1]]),
    fitScale("diverging", [[-1, 1]]),
    fitScale("sequential", [[0, 1]]),
    fitScale("whole", [[1, 2, 3, 4, 5]]),
  ];
  const classes = scales.flatMap((scale) =>
    Array.from({ length: 41 }, (_, n) => chooseClass(scale, scale.kind === "whole" ? 1 + n / 10 : n / 20 - 1)),
  );
  test.each([...new Set(classes)])("%s", (name) => {
    expect(css).toMatch(new RegExp(`\\.${name}\\b[^{]*\\{[^}]*(background|text-decoration)`));
  });
});

// Text in --ink on each colour, in both themes: at least 4.5:1 (WCAG AA).
describe("coloured text can be read", () => {
  const theme = readFileSync(`${import.meta.dirname}/../../../../../cli/forage_cli/reports/theme.css`, "utf8");
  const [light = "", dark = ""] = theme.split("@media (prefers-color-scheme: dark)");
  const colour = (part: string, name: string) => {
    const found = new RegExp(`--${name}: *#([0-9a-f]{6})`).exec(part)?.[1];
    if (found === undefined) throw new Error(`theme.css has no colour --${name}`);
    return [0, 2, 4].map((at) => Number.parseInt(found.slice(at, at + 2), 16));
  };
  const luminance = (rgb: number[]) => {
    const [r = 0, g = 0, b = 0] = rgb.map((channel) => {
      const share = channel / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a: number[], b: number[]) => {
    const [high = 0, low = 0] = [luminance(a), luminance(b)].toSorted((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const names = ["positive", "negative", "neutral", "scale-0", "scale-1", "scale-2", "scale-3", "scale-4"];
  test.each(names.flatMap((name) => [[name, "light"] as const, [name, "dark"] as const]))("%s, %s", (name, which) => {
    const part = which === "light" ? light : dark;
    expect(contrast(colour(part, "ink"), colour(part, name))).toBeGreaterThanOrEqual(4.5);
  });
});
