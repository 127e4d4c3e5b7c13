// "Find in this trajectory": the browser's own search sees only the rows that are drawn.
import { findText, type TextRange } from "./gold";
import { readText, type Row } from "./layout";

export interface Match {
  /** The row where it begins. */
  row: number;
}

export interface Found {
  matches: Match[];
  /** What to mark in each row. */
  ranges: Map<number, TextRange[]>;
}

export const NOTHING: Found = { matches: [], ranges: new Map() };

/** Finds a text in all rows; a match may begin in one stretch of a block and end in the next. */
export function findInRows(rows: readonly Row[], wanted: string): Found {
  if (wanted === "") return NOTHING;
  const matches: Match[] = [];
  const ranges = new Map<number, TextRange[]>();
  const add = (row: number, range: TextRange) => {
    ranges.set(row, [...(ranges.get(row) ?? []), range]);
  };
  for (let first = 0; first < rows.length;) {
    const stretch = [readText(rows[first] as Row)];
    while (isContinued(rows[first + stretch.length - 1]) && first + stretch.length < rows.length) {
      stretch.push(readText(rows[first + stretch.length] as Row));
    }
    for (const { begin, end } of findText(stretch.join(""), wanted)) {
      let offset = 0;
      let isFirst = true;
      stretch.forEach((text, place) => {
        const [from, to] = [Math.max(begin - offset, 0), Math.min(end - offset, text.length)];
        if (from < to) {
          if (isFirst) matches.push({ row: first + place });
          isFirst = false;
          add(first + place, { begin: from, end: to });
        }
        offset += text.length;
      });
    }
    first += stretch.length;
  }
  return { matches, ranges };
}

function isContinued(row: Row | undefined): boolean {
  return row?.kind === "text" && !row.isLast;
}
