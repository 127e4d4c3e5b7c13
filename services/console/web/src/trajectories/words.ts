// Words of a search for text, as the server reads it: single words, beginnings of words* and "phrases".
import type { TextRange } from "../trajectory/gold";

/** Finds the words of a search in a text, to mark them. */
export function findWords(text: string, search: string): TextRange[] {
  const words = [...search.matchAll(/"([^"]+)"|(\S+)/g)].map(([, phrase, word]) =>
    (phrase ?? word ?? "").replaceAll('"', ""),
  );
  const patterns = words
    .map((word) => word.replace(/\*$/, "").trim())
    .filter((word) => word !== "")
    .toSorted((a, b) => b.length - a.length)
    .map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/\s+/g, "\\s+"));
  if (patterns.length === 0) return [];
  return [...text.matchAll(new RegExp(patterns.join("|"), "giu"))].map(({ index, 0: found }) => ({
    begin: index,
    end: index + found.length,
  }));
}

const BEFORE = 24;

/** A snippet from a little before its first match, so that the match is in sight on a narrow line. */
export function trimSnippet(snippet: string, search: string): string {
  const begin = findWords(snippet, search)[0]?.begin ?? 0;
  if (begin <= BEFORE) return snippet;
  const space = snippet.indexOf(" ", begin - BEFORE);
  return `…${snippet.slice(space >= 0 && space < begin ? space + 1 : begin - BEFORE)}`;
}
