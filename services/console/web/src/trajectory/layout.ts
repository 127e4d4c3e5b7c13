// A trajectory as a list of rows that are drawn one by one: the prompt, heads of turns, stretches of text, passages.
import type { Model } from "../api/client";
import { createGoldFinder, type TextRange } from "./gold";

/** As the client gives them: a pair is a list to it. */
export type Sample = Omit<Model<"TrajectoryRow">, "versions"> & { versions: readonly number[] | null };
export type Detail = Omit<Model<"TrajectoryDetail">, "summary"> & { summary: Sample };
type Block = Model<"Block">;
type Turn = Model<"TurnDetail">;
export type Author = Block["author"];

/** One token, or a text of unknown tokens. */
export interface Unit {
  text: string;
  /** Number of the token in the response. */
  token: number | null;
  /** Static classes: what kind of text it is. */
  className: string;
  /** Where the text has an accepted answer. */
  gold: readonly TextRange[];
  /** What of the text is shown: line breaks at the ends of a block are the layout's. */
  shown: TextRange;
}

export type Row =
  | { kind: "prompt"; key: string; text: string }
  | { kind: "head"; key: string; block: Block; turn: Turn | null; hasPassages: boolean }
  | { kind: "text"; key: string; author: Author; units: Unit[]; isLast: boolean }
  | { kind: "passages"; key: string; turn: Turn };

/** After so many units a stretch ends with the line, then with the sentence, and at the latest with the word. */
const LINE_UNITS = 40;
const SENTENCE_UNITS = 80;
const MAX_UNITS = 140;
const MAX_TEXT = 1200;

/** `showPassages`: passages take the place of the text that the policy read of them. */
export function layOut(detail: Detail, showPassages: boolean): Row[] {
  const findGold = createGoldFinder(detail.summary.targets);
  const turns = new Map(detail.turns.map((turn) => [turn.index, turn]));
  const rows: Row[] = [];
  if (detail.prompt !== "") rows.push({ kind: "prompt", key: "prompt", text: detail.prompt });
  // What the chat template wrote in the policy's name stands below the head of the turn that goes on from it.
  let opening: Row[] = [];
  detail.blocks.forEach((block, number) => {
    if (block.author === "prompt") return;
    if (block.author === "opening") {
      const units = listUnits(block, null, findGold);
      opening = [{ kind: "text", key: `text-${number}`, author: block.author, units, isLast: false }];
      return;
    }
    const turn = block.turn === null ? null : (turns.get(block.turn) ?? null);
    const hasPassages = block.author === "env" && turn !== null && turn.passages.length > 0;
    rows.push({ kind: "head", key: `head-${number}`, block, turn, hasPassages }, ...opening);
    opening = [];
    if (hasPassages && showPassages) {
      rows.push({ kind: "passages", key: `passages-${number}`, turn });
      return;
    }
    const parts = split(listUnits(block, detail.tokens?.text ?? null, findGold));
    parts.forEach((units, part) => {
      const isLast = part === parts.length - 1;
      rows.push({ kind: "text", key: `text-${number}-${part}`, author: block.author, units, isLast });
    });
  });
  return rows;
}

/** The units of a block, with what its pieces say about them. */
export function listUnits(
  block: Block,
  tokens: readonly string[] | null,
  findGold: (text: string) => TextRange[],
): Unit[] {
  const pieces: { end: number; className: string }[] = [];
  let text = "";
  for (const piece of block.pieces) {
    text += piece.text;
    pieces.push({ end: text.length, className: nameClass(piece) });
  }
  const isKnown = tokens !== null && block.begin !== null && block.end !== null;
  const first = block.begin ?? 0;
  const own = isKnown ? tokens.slice(first, block.end ?? 0) : cutPieces(block.pieces.map((piece) => piece.text));
  const joined = own.join("");
  // The texts of single tokens need not add up to the text, for instance where a character spans several of them.
  const isSame = joined === text;
  const gold = findGold(joined);
  const units: Unit[] = [];
  let [begin, piece, range] = [0, 0, 0];
  own.forEach((unit, place) => {
    const end = begin + unit.length;
    while (piece < pieces.length - 1 && (pieces[piece]?.end ?? 0) <= begin) piece += 1;
    while (range < gold.length && (gold[range]?.end ?? 0) <= begin) range += 1;
    const within: TextRange[] = [];
    for (let next = range; next < gold.length && (gold[next]?.begin ?? 0) < end; next += 1) {
      const { begin: from, end: to } = gold[next] ?? { begin: 0, end: 0 };
      within.push({ begin: Math.max(0, from - begin), end: Math.min(unit.length, to - begin) });
    }
    units.push({
      text: unit,
      token: isKnown ? first + place : null,
      className: isSame ? (pieces[piece]?.className ?? "") : "",
      gold: within,
      shown: { begin: 0, end: unit.length },
    });
    begin = end;
  });
  markEdges(units);
  return units;
}

function nameClass({ is_tag, within }: Model<"Piece">): string {
  if (is_tag) return "tag";
  return within === "answer" || within === "think" ? within : within === "" || within === "information" ? "" : "query";
}

/** Texts without tokens in parts that can be drawn one by one. */
function cutPieces(texts: readonly string[]): string[] {
  return texts.flatMap((text) => {
    const parts = text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
    return parts.flatMap((part) => part.match(new RegExp(`[\\s\\S]{1,${MAX_TEXT}}`, "gu")) ?? []);
  });
}

/** Hides line breaks at the ends of a block; their tokens remain. */
function markEdges(units: Unit[]): void {
  for (const unit of units) {
    unit.shown.begin = /^\s*\n/.exec(unit.text)?.[0].length ?? 0;
    if (unit.shown.begin < unit.text.length) break;
  }
  for (const unit of units.toReversed()) {
    const blank = /\n\s*$/.exec(unit.text)?.index;
    if (blank === undefined) break;
    unit.shown.end = Math.max(unit.shown.begin, blank);
    if (unit.shown.end > unit.shown.begin) break;
  }
}

/** Cuts units into stretches. */
export function split(units: readonly Unit[]): Unit[][] {
  const parts: Unit[][] = [];
  let part: Unit[] = [];
  let size = 0;
  for (const unit of units) {
    const isFull = part.length >= MAX_UNITS || size >= 3 * MAX_TEXT;
    if (isFull && (/^\s/.test(unit.text) || part.length >= MAX_UNITS + LINE_UNITS || size >= 4 * MAX_TEXT)) {
      parts.push(part);
      [part, size] = [[], 0];
    }
    part.push(unit);
    size += unit.text.length;
    const endsSentence = part.length >= SENTENCE_UNITS && /[.!?…。]\s*$/.test(unit.text);
    if (endsSentence || (part.length >= LINE_UNITS && unit.text.includes("\n"))) {
      parts.push(part);
      [part, size] = [[], 0];
    }
  }
  if (part.length > 0) parts.push(part);
  return parts;
}

/** The text of a row, for searching and copying. */
export function readText(row: Row): string {
  switch (row.kind) {
    case "prompt":
      return row.text;
    case "text":
      return row.units.map((unit) => unit.text).join("");
    case "passages":
      return row.turn.passages.map(({ title, text }) => `${title}\n${text}`).join("\n");
    case "head":
      return "";
  }
}

/** The row that shows a token; -1 where none does. */
export function findRow(rows: readonly Row[], token: number): number {
  return rows.findIndex(
    (row) =>
      row.kind === "text" && (row.units[0]?.token ?? Infinity) <= token && (row.units.at(-1)?.token ?? -1) >= token,
  );
}

/** The tokens that rows show. */
export function listTokens(rows: readonly Row[]): Set<number> {
  const units = rows.flatMap((row) => (row.kind === "text" ? row.units : []));
  return new Set(units.flatMap(({ token }) => (token === null ? [] : [token])));
}
