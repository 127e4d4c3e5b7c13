import { describe, expect, it } from "vitest";
import type { Model } from "../api/client";
import { choosePair, diffTexts, isRight, move, nameOf, type Part, type Point } from "./diff";

function block(author: Model<"Author">, ...pieces: [string, string?, boolean?][]): Model<"Block"> {
  return {
    author,
    begin: null,
    end: null,
    turn: null,
    pieces: pieces.map(([text, within = "", isTag = false]) => ({ text, within, is_tag: isTag })),
  };
}

function point(place: string, em: number | null, step = 0): Point {
  return { place, row: 0, step, kind: "validation", em, reward: em, answer: null, samples: 1 };
}

const textOf = (parts: Part[], change?: string) =>
  parts
    .filter((part) => change === undefined || part.change === change)
    .map((part) => part.text)
    .join("");

describe("diffTexts", () => {
  const older = [block("model", ["<answer>", "answer", true], [" Paris ", "answer"], ["</answer>", "answer", true])];
  const newer = [
    block("model", ["<search>", "search", true], [" Kima ", "search"], ["</search>", "search", true]),
    block("env", ["Kima is in Angola."]),
    block("model", ["<answer>", "answer", true], [" Luanda ", "answer"], ["</answer>", "answer", true]),
  ];

  it("keeps both texts whole", () => {
    const diff = diffTexts(older, newer);
    expect(textOf(diff.left)).toBe("<answer> Paris </answer>");
    expect(textOf(diff.right)).toBe("<search> Kima </search>Kima is in Angola.<answer> Luanda </answer>");
    expect(textOf(diff.unified, "removed")).toBe(textOf(diff.left, "removed"));
    expect(textOf(diff.unified, "added")).toBe(textOf(diff.right, "added"));
    expect(textOf(diff.right, "added")).toContain("Luanda");
    expect(textOf(diff.left, "removed")).toContain("Paris");
  });
  it("keeps authors and tags", () => {
    const diff = diffTexts(older, newer);
    const env = diff.right.filter((part) => part.author === "env");
    expect(textOf(env)).toBe("Kima is in Angola.");
    expect(diff.right.filter((part) => part.isTag).every((part) => /[<>/]/.test(part.text))).toBe(true);
  });
  it("marks nothing where texts are equal", () => {
    const diff = diffTexts(newer, newer);
    expect(diff.unified.every((part) => part.change === "same")).toBe(true);
    expect(textOf(diff.unified)).toBe(textOf(diff.right));
  });
  it("compares with nothing", () => {
    expect(diffTexts([], older).unified.every((part) => part.change === "added")).toBe(true);
    expect(diffTexts([], []).unified).toEqual([]);
  });
  it("marks everything where comparing takes too long", () => {
    const many = (seed: number) => [
      block("model", [Array.from({ length: 20_000 }, (_, i) => `w${(i * seed) % 9973}`).join(" ")]),
    ];
    const diff = diffTexts(many(7), many(5003), 1);
    expect(diff.isWhole).toBe(true);
    expect(diff.left.every((part) => part.change === "removed")).toBe(true);
    expect(diff.right.every((part) => part.change === "added")).toBe(true);
  });
});

describe("choosePair", () => {
  const points = [point("before", 0), point("step-10", 0), point("step-20", 1), point("after", 1)];
  it("compares the last with the latest that had another outcome", () => {
    expect(choosePair(points, "", "")).toEqual({ a: 1, b: 3 });
  });
  it("compares with the first where the outcome never changed", () => {
    expect(choosePair([point("before", 1), point("x", 1), point("after", 1)], "", "")).toEqual({ a: 0, b: 2 });
  });
  it("takes the names of the address, and forgets those that are no appearances", () => {
    expect(choosePair(points, "before.0", "step-20.0")).toEqual({ a: 0, b: 2 });
    expect(choosePair(points, "gone.0", "step-20.0")).toEqual({ a: 1, b: 2 });
    expect(choosePair(points, "", "gone.9")).toEqual({ a: 1, b: 3 });
  });
  it("compares one with itself, and nothing with nothing", () => {
    expect(choosePair([point("before", null)], "", "")).toEqual({ a: 0, b: 0 });
    expect(choosePair([], "", "")).toBeNull();
  });
  it("stays within the appearances", () => {
    expect(move(points, 0, -1)).toBe("before.0");
    expect(move(points, 3, 1)).toBe("after.0");
    expect(move(points, 1, 1)).toBe(nameOf(points[2] as Point));
  });
});

it("takes an appearance for right when one of its samples was", () => {
  expect(isRight(point("x", 0.25))).toBe(true);
  expect(isRight(point("x", 0))).toBe(false);
  expect(isRight(point("x", null))).toBeNull();
});
