import { expect, it } from "vitest";
import { listSettings, searchSettings } from "./settings";

const tree = {
  trainer: { actor: { lr: 0.1, betas: [0.9, 0.95] }, tests: {}, note: null },
  retriever: { topk: 3, environments: { plain: { turns: 1 } } },
};
const settings = listSettings(tree, ["trainer.actor.lr", "retriever.environments"]);

it("lists settings by name, changed ones first", () => {
  expect(settings.map(({ name, value, isChanged }) => [name, value, isChanged])).toEqual([
    ["retriever.environments.plain.turns", "1", true],
    ["trainer.actor.lr", "0.1", true],
    ["retriever.topk", "3", false],
    ["trainer.actor.betas", "[0.9,0.95]", false],
    ["trainer.note", "null", false],
    ["trainer.tests", "{}", false],
  ]);
});

it("finds words in names and values", () => {
  expect(searchSettings(settings, "ACTOR 0.1", false).map(({ name }) => name)).toEqual(["trainer.actor.lr"]);
  expect(searchSettings(settings, "", true)).toHaveLength(2);
  expect(searchSettings(settings, "nothing", false)).toEqual([]);
});
