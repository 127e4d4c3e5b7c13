// Which appearances of a question are compared, and what differs between their texts.
import { diffWordsWithSpace } from "diff";
import type { Model } from "../api/client";

type Block = Model<"Block">;
type Author = Model<"Author">;
export type Point = Model<"QuestionPoint">;
export type Change = "same" | "removed" | "added";

export interface Part {
  text: string;
  change: Change;
  author: Author;
  within: string;
  isTag: boolean;
}

export interface TextDiff {
  /** The older text, the newer, and both in one. */
  left: Part[];
  right: Part[];
  unified: Part[];
  /** Whether the texts differ so much that the comparison was given up: all of both is marked. */
  isWhole: boolean;
}

/** After so long a comparison is given up: the texts have little in common. */
const LIMIT_MS = 1500;

type Style = Pick<Part, "author" | "within" | "isTag">;

function flatten(blocks: Block[]): { text: string; runs: (Style & { text: string })[] } {
  const runs = blocks.flatMap((block) =>
    block.pieces.map((piece) => ({
      text: piece.text,
      author: block.author,
      within: piece.within,
      isTag: piece.is_tag,
    })),
  );
  return { text: runs.map((run) => run.text).join(""), runs };
}

/** Cuts texts off a list of styled runs, one after another. */
function makeCutter(runs: (Style & { text: string })[]): (length: number, change: Change) => Part[] {
  let index = 0;
  let offset = 0;
  return (length, change) => {
    const parts: Part[] = [];
    let left = length;
    while (left > 0) {
      const run = runs[index];
      if (run === undefined) break;
      const text = run.text.slice(offset, offset + left);
      if (text !== "") parts.push({ ...run, text, change });
      left -= text.length;
      offset += text.length;
      if (offset >= run.text.length) {
        index += 1;
        offset = 0;
      }
    }
    return parts;
  };
}

/** Compares two texts word by word; their authors and tags are kept. */
export function diffTexts(older: Block[], newer: Block[], limitMs = LIMIT_MS): TextDiff {
  const a = flatten(older);
  const b = flatten(newer);
  const cutA = makeCutter(a.runs);
  const cutB = makeCutter(b.runs);
  const found = diffWordsWithSpace(a.text, b.text, { timeout: limitMs });
  const changes = found ?? [
    { value: a.text, removed: true, added: false },
    { value: b.text, removed: false, added: true },
  ];
  const diff: TextDiff = { left: [], right: [], unified: [], isWhole: found === undefined };
  for (const { value, removed, added } of changes) {
    if (!added) {
      const parts = cutA(value.length, removed ? "removed" : "same");
      diff.left.push(...parts);
      if (removed) diff.unified.push(...parts);
    }
    if (!removed) {
      const parts = cutB(value.length, added ? "added" : "same");
      diff.right.push(...parts);
      diff.unified.push(...parts);
    }
  }
  return diff;
}

/** The name of an appearance in the address of the page. */
export function nameOf(point: Pick<Point, "place" | "row">): string {
  return `${point.place}.${point.row}`;
}

/** Whether any of the samples of an appearance was right; null: not known. */
export function isRight(point: Pick<Point, "em">): boolean | null {
  return point.em === null ? null : point.em > 0;
}

/**
 * Chooses the two appearances to compare, by the names in the address. Without names: the last one, and the latest
 * before it with another outcome, else the first.
 */
export function choosePair(points: Point[], a: string, b: string): { a: number; b: number } | null {
  if (points.length === 0) return null;
  const find = (name: string) => points.findIndex((point) => nameOf(point) === name);
  const foundB = find(b);
  const newer = foundB === -1 ? points.length - 1 : foundB;
  const foundA = find(a);
  if (foundA !== -1) return { a: foundA, b: newer };
  const outcome = points[newer] === undefined ? null : isRight(points[newer]);
  const before = points.findLastIndex((point, index) => index < newer && isRight(point) !== outcome);
  return { a: Math.max(0, before), b: newer };
}

/** Moves a choice by some appearances; it stays within them. */
export function move(points: Point[], index: number, by: number): string {
  const point = points[Math.min(points.length - 1, Math.max(0, index + by))];
  return point === undefined ? "" : nameOf(point);
}
