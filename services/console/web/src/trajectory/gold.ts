// Accepted answers within texts.

export interface TextRange {
  begin: number;
  end: number;
}

const MAX_RANGES = 5000;

/** Finds where texts contain an accepted answer as whole words, whatever the case and the punctuation between words. */
export function createGoldFinder(targets: readonly string[]): (text: string) => TextRange[] {
  const patterns = targets
    .map((target) => target.match(/[\p{L}\p{N}]+/gu) ?? [])
    .filter((words) => words.length > 0)
    .toSorted((a, b) => b.length - a.length)
    .map((words) => words.join("[^\\p{L}\\p{N}]{1,6}"));
  if (patterns.length === 0) return () => [];
  const pattern = new RegExp(`(?<![\\p{L}\\p{N}])(?:${patterns.join("|")})(?![\\p{L}\\p{N}])`, "giu");
  return (text) => {
    const found: TextRange[] = [];
    for (const match of text.matchAll(pattern)) {
      found.push({ begin: match.index, end: match.index + match[0].length });
      if (found.length >= MAX_RANGES) break;
    }
    return found;
  };
}

/** Finds a text that the reader types, whatever the case. */
export function findText(text: string, wanted: string): TextRange[] {
  const found: TextRange[] = [];
  const [where, what] = [text.toLowerCase(), wanted.toLowerCase()];
  // A letter whose lower case is longer would shift what follows.
  if (what === "" || where.length !== text.length) return found;
  for (let at = where.indexOf(what); at >= 0 && found.length < MAX_RANGES; at = where.indexOf(what, at + what.length)) {
    found.push({ begin: at, end: at + what.length });
  }
  return found;
}

export interface Part {
  text: string;
  marked: boolean;
}

/** Cuts a text at ranges, which are in order and do not overlap; `offset` is where the text begins. */
export function cutText(text: string, ranges: readonly TextRange[], offset = 0): Part[] {
  const parts: Part[] = [];
  let place = 0;
  for (const range of ranges) {
    const begin = Math.max(place, range.begin - offset);
    const end = Math.min(text.length, range.end - offset);
    if (end <= begin) continue;
    if (begin > place) parts.push({ text: text.slice(place, begin), marked: false });
    parts.push({ text: text.slice(begin, end), marked: true });
    place = end;
  }
  if (place < text.length) parts.push({ text: text.slice(place), marked: false });
  return parts;
}
