import { describe, expect, test } from "vitest";
import { linkExport } from "./FilterBar";
import { applyPreset, listChips, PRESETS, readQuery, toggleSort, writeQuery, type ListQuery } from "./filter";
import { findWords, trimSnippet } from "./words";

const FULL: ListQuery = {
  place: "step-10",
  text: 'capital "of the"',
  uid: "facts/train/7/",
  source: ["facts", "a,b"],
  status: ["OK", "TIMEOUT"],
  reason: "a shard was down, twice",
  right: false,
  truncated: true,
  finished: false,
  trained: true,
  step_min: 0,
  step_max: 40,
  reward_min: -0.5,
  reward_max: 1,
  searches_min: 0,
  searches_max: 3,
  version_min: 8,
  version_max: 9,
  sort: "mismatch",
  order: "ascending",
};

describe("the filter in the address", () => {
  test("is read as it was written, zeros and commas too", () => {
    expect(readQuery(new URLSearchParams(writeQuery(FULL).toString()))).toEqual(FULL);
  });

  test("leaves out what is the default, and keeps what else is there", () => {
    const search = writeQuery(
      { place: "steps", sort: "place", order: "descending" },
      new URLSearchParams("colour=kl&place=x"),
    );
    expect(search.toString()).toBe("colour=kl");
  });

  test("has flags as the interface writes them, too", () => {
    expect(readQuery(new URLSearchParams("right=false&trained=true"))).toEqual({ right: false, trained: true });
  });

  test.each(["reward_min=abc", "right=yes", "sort=name", "order=up", "step_min=", "reward_max=Infinity", "text=%20"])(
    "ignores %s",
    (address) => {
      expect(readQuery(new URLSearchParams(address))).toEqual({});
    },
  );
});

describe("chips", () => {
  test("name each filter, and say what is left without it", () => {
    const chips = listChips(FULL);
    expect(chips.map(({ label }) => label)).toEqual([
      "step-10",
      '“capital "of the"”',
      "question facts/train/7",
      "facts",
      "a,b",
      "OK",
      "TIMEOUT",
      "a shard was down, twice",
      "wrong",
      "truncated",
      "without an answer",
      "trained on",
      "step 0–40",
      "reward -0.5–1",
      "searches 0–3",
      "version 8–9",
    ]);
    expect(chips.find(({ key }) => key === "status-OK")?.without.status).toEqual(["TIMEOUT"]);
    expect(chips.find(({ key }) => key === "reward")?.without).not.toHaveProperty("reward_min");
  });

  test("removed one after another leave no filter", () => {
    let query = FULL;
    for (let left = listChips(query).length; left > 0; left -= 1) query = listChips(query)[0]?.without ?? query;
    expect(query).toEqual({ sort: "mismatch", order: "ascending" });
  });

  test("say one end of a range", () => {
    expect(listChips({ searches_min: 1 })[0]?.label).toBe("searches ≥ 1");
    expect(listChips({ reward_max: 0 })[0]?.label).toBe("reward ≤ 0");
    expect(listChips({ step_min: 3, step_max: 3 })[0]?.label).toBe("step 3");
  });
});

test("presets keep where the reader looks, and nothing else", () => {
  const [first] = PRESETS;
  if (first === undefined) throw new Error("there are presets");
  expect(applyPreset(first, FULL)).toEqual({
    place: "step-10",
    step_min: 0,
    step_max: 40,
    source: ["facts", "a,b"],
    searches_min: 1,
    sort: "search_advantage",
  });
});

test("a column sorts down, up, and then no more", () => {
  const once = toggleSort({ right: true }, "reward");
  const twice = toggleSort(once, "reward");
  expect(once).toEqual({ right: true, sort: "reward" });
  expect(twice).toEqual({ right: true, sort: "reward", order: "ascending" });
  expect(toggleSort(twice, "reward")).toEqual({ right: true });
  expect(toggleSort({}, "place")).toEqual({ sort: "place", order: "ascending" });
});

test("an export has the filter, not the order", () => {
  expect(linkExport("a/b", { right: true, source: ["x", "y"], sort: "reward", order: "ascending" })).toBe(
    "/api/runs/a%2Fb/trajectories.parquet?source=x&source=y&right=true",
  );
});

test("words and phrases of a search are found in a snippet", () => {
  const found = (text: string, search: string) =>
    findWords(text, search).map(({ begin, end }) => text.slice(begin, end));
  expect(found("The Capital of (the) land", 'capital "of (the)"')).toEqual(["Capital", "of (the)"]);
  expect(found("a+b", "a+b")).toEqual(["a+b"]);
  expect(found("rarity12", "rari*")).toEqual(["rari"]);
  expect(found("text", "*")).toEqual([]);
  expect(found("text", '"')).toEqual([]);
});

test("a snippet begins a little before its match", () => {
  const before = "example, <answer> Beijing </answer>. Question: What is the";
  expect(trimSnippet(`${before} capital of`, "capital")).toBe("…Question: What is the capital of");
  expect(trimSnippet(`${"x".repeat(90)}capital`, "capital")).toBe(`…${"x".repeat(24)}capital`);
  expect(trimSnippet("the capital", "capital")).toBe("the capital");
  expect(trimSnippet(before, "none")).toBe(before);
});
