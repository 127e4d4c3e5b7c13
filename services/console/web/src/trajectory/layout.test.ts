import { describe, expect, test } from "vitest";
import { makeDetail } from "../testing/trajectories";
import { cutText, createGoldFinder, findText } from "./gold";
import { findInRows } from "./find";
import { findRow, layOut, listUnits, readText, split, type Row, type Unit } from "./layout";

const unit = (text: string, token: number | null = null): Unit => ({
  text,
  token,
  className: "",
  gold: [],
  shown: { begin: 0, end: text.length },
});
const kinds = (rows: Row[]) => rows.map(({ kind }) => kind);
const units = (rows: Row[]) => rows.flatMap((row) => (row.kind === "text" ? row.units : []));

describe("the rows of a trajectory", () => {
  test("are the prompt, and for each block its head and its text, or the passages that it shows", () => {
    expect(kinds(layOut(makeDetail(), true))).toEqual(["prompt", "head", "text", "head", "passages", "head", "text"]);
    expect(kinds(layOut(makeDetail(), false))).toEqual(["prompt", "head", "text", "head", "text", "head", "text"]);
  });

  test("of a turn that the chat template began show its opening below the turn's head", () => {
    const detail = makeDetail();
    const opening = {
      author: "opening" as const,
      begin: null,
      end: null,
      turn: 1,
      pieces: [{ text: "<think>", within: "think", is_tag: true }],
    };
    const [prompt, ...others] = detail.blocks;
    const rows = layOut({ ...detail, blocks: [...(prompt ? [prompt] : []), opening, ...others] }, true);
    expect(kinds(rows).slice(0, 4)).toEqual(["prompt", "head", "text", "text"]);
    expect(rows[2]).toMatchObject({ kind: "text", author: "opening" });
    expect(rows.map(readText).join("")).toContain("<think>");
  });

  test("show every token once, in order", () => {
    const shown = units(layOut(makeDetail(), false)).map(({ token }) => token);
    expect(shown).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8]);
  });

  test("of a validation have no tokens but all of the text", () => {
    const rows = layOut(makeDetail({ tokens: null }), false);
    expect(units(rows).every(({ token }) => token === null)).toBe(true);
    expect(rows.map(readText).join("")).toContain("\n\nIts currency is the Ugandan Shilling.\n");
  });

  test("hide line breaks at the ends of a block, not their tokens", () => {
    const env = units(layOut(makeDetail(), false)).slice(3, 6);
    expect(env.map(({ text, shown }) => text.slice(shown.begin, shown.end))).toEqual([
      "",
      "Its currency is the",
      " Ugandan Shilling.",
    ]);
  });

  test("of a block of blanks alone are not lost", () => {
    const block = {
      author: "env" as const,
      begin: 0,
      end: 2,
      turn: 1,
      pieces: [{ text: "\n\n", within: "", is_tag: false }],
    };
    const found = listUnits(block, ["\n", "\n"], () => []);
    expect(found.map(({ token, shown }) => [token, shown.end - shown.begin])).toEqual([
      [0, 0],
      [1, 0],
    ]);
  });

  test("say which text is a tag, a query or an answer", () => {
    const names = units(layOut(makeDetail(), false)).map(({ className }) => className);
    expect(names).toEqual(["tag", "query", "tag", "", "", "", "tag", "answer", "answer"]);
  });

  test("say nothing about texts whose tokens do not add up to them", () => {
    const detail = makeDetail({}, { text: Array<string>(9).fill("�") });
    expect(units(layOut(detail, false)).every(({ className }) => className === "")).toBe(true);
  });
});

describe("stretches", () => {
  test("of 32,000 tokens in one line are short, and lose none", () => {
    const all = Array.from({ length: 32_000 }, (_, n) => unit(n % 7 === 0 ? " word" : "x", n));
    const parts = split(all);
    expect(parts.flat()).toEqual(all);
    expect(Math.max(...parts.map((part) => part.length))).toBeLessThanOrEqual(180);
  });

  test("end with the line, or with the sentence", () => {
    const lines = Array.from({ length: 200 }, (_, n) => unit(n % 10 === 9 ? "\n" : "a"));
    expect(split(lines).map((part) => part.at(-1)?.text)).toEqual(Array(5).fill("\n"));
    const sentences = Array.from({ length: 320 }, (_, n) => unit(n % 10 === 9 ? " end." : " a"));
    expect(split(sentences).map((part) => part.at(-1)?.text)).toEqual(Array(4).fill(" end."));
  });

  test("of a text without tokens are cut too", () => {
    const text = "x".repeat(100_000);
    const block = {
      author: "env" as const,
      begin: null,
      end: null,
      turn: 1,
      pieces: [{ text, within: "", is_tag: false }],
    };
    const parts = split(listUnits(block, null, () => []));
    expect(parts.length).toBeGreaterThan(10);
    expect(
      parts
        .flat()
        .map((part) => part.text)
        .join(""),
    ).toBe(text);
  });
});

test("the row of a token is found", () => {
  const rows = layOut(makeDetail(), false);
  expect(findRow(rows, 4)).toBe(4);
  expect(findRow(rows, 8)).toBe(6);
  expect(findRow(layOut(makeDetail(), true), 4)).toBe(-1);
});

describe("accepted answers", () => {
  const find = (targets: string[], text: string) =>
    createGoldFinder(targets)(text).map(({ begin, end }) => text.slice(begin, end));
  test.each([
    [["Ugandan Shilling"], "the ugandan  shilling.", ["ugandan  shilling"]],
    [["Ugandan Shilling"], "Ugandan-Shilling", ["Ugandan-Shilling"]],
    [["Rom"], "Rome is in Romania, Rom is Rome", ["Rom"]],
    [["Kraków", "Krakow"], "Kraków or Krakow", ["Kraków", "Krakow"]],
    [["Paris", "Paris, France"], "in Paris, France", ["Paris, France"]],
    [["C++ (language)"], "c++ (language)", ["c++ (language"]],
    [["???", ""], "???", []],
    [[], "text", []],
  ])("%j in %j", (targets, text, expected) => {
    expect(find(targets, text)).toEqual(expected);
  });

  test("are marked across tokens", () => {
    const [answer, more] = units(layOut(makeDetail(), false)).slice(7);
    expect(answer?.gold).toEqual([{ begin: 1, end: 8 }]);
    expect(more?.gold).toEqual([{ begin: 0, end: 9 }]);
  });
});

describe("finding a text", () => {
  test("ignores case and counts each place once", () => {
    expect(findText("Aa aA", "aa")).toHaveLength(2);
    expect(findText("text", "")).toEqual([]);
    expect(findText("İstanbul", "stanbul")).toEqual([]);
  });

  test("finds what begins in one stretch and ends in the next", () => {
    const row = (number: number, text: string, isLast: boolean): Row => ({
      kind: "text",
      key: String(number),
      author: "model",
      units: [unit(text)],
      isLast,
    });
    const rows = [row(0, "one tw", false), row(1, "o three", true), row(2, "two", true)];
    const { matches, ranges } = findInRows(rows, "two");
    expect(matches).toEqual([{ row: 0 }, { row: 2 }]);
    expect(ranges.get(0)).toEqual([{ begin: 4, end: 6 }]);
    expect(ranges.get(1)).toEqual([{ begin: 0, end: 1 }]);
  });

  test("does not join blocks", () => {
    expect(findInRows(layOut(makeDetail(), false), "</search>\n").matches).toEqual([]);
  });
});

test("a text is cut at ranges without loss", () => {
  const parts = cutText(
    "abcdef",
    [
      { begin: 11, end: 13 },
      { begin: 15, end: 99 },
    ],
    10,
  );
  expect(parts).toEqual([
    { text: "a", marked: false },
    { text: "bc", marked: true },
    { text: "de", marked: false },
    { text: "f", marked: true },
  ]);
});
