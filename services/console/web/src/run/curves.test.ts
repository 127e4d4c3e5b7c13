import { describe, expect, it } from "vitest";
import { mergeCurves } from "./curves";

const old = { steps: [1, 2, 3], time: [10, 20, 30], columns: { a: [1, 2, 3], b: [0, null, 0] } };

describe("mergeCurves", () => {
  it("adds later steps", () => {
    expect(mergeCurves(old, { steps: [4], time: [40], columns: { a: [4], b: [1] } })).toEqual({
      steps: [1, 2, 3, 4],
      time: [10, 20, 30, 40],
      columns: { a: [1, 2, 3, 4], b: [0, null, 0, 1] },
    });
  });
  it("returns the same object when nothing is new, so that nothing is drawn again", () => {
    expect(mergeCurves(old, { steps: [], time: [], columns: { a: [], b: [] } })).toBe(old);
  });
  it("replaces steps that a run took again", () => {
    const merged = mergeCurves(old, { steps: [2, 3], time: [50, 60], columns: { a: [7, 8], b: [7, 8] } });
    expect(merged.steps).toEqual([1, 2, 3]);
    expect(merged.columns["a"]).toEqual([1, 7, 8]);
  });
  it("fills what one side does not know with gaps", () => {
    const merged = mergeCurves(old, { steps: [4], time: [null], columns: { a: [4], c: [9] } });
    expect(merged.columns["b"]).toEqual([0, null, 0, null]);
    expect(merged.columns["c"]).toEqual([null, null, null, 9]);
    expect(merged.time).toEqual([10, 20, 30, null]);
  });
});
