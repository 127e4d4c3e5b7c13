import { memo } from "react";
import { cutText, type TextRange } from "./gold";

/** A text with what was looked for and accepted answers marked; always text, never markup. */
export const Marked = memo(function Marked({
  text,
  gold,
  found = [],
  offset = 0,
}: {
  text: string;
  gold: readonly TextRange[];
  found?: readonly TextRange[];
  /** Where the text begins in what was searched. */
  offset?: number;
}) {
  if (gold.length === 0 && found.length === 0) return text;
  return cutText(text, found, offset).map((part, place, parts) => {
    const begin = parts.slice(0, place).reduce((sum, one) => sum + one.text.length, 0);
    const within = cutText(part.text, gold, begin).map(({ text: inner, marked }, number) =>
      marked ? (
        <mark key={number} title="accepted answer">
          {inner}
        </mark>
      ) : (
        inner
      ),
    );
    return part.marked ? (
      <span key={place} className="found">
        {within}
      </span>
    ) : (
      within
    );
  });
});
