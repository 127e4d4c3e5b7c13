import type { ReactNode } from "react";
import type { Part, TextDiff } from "./diff";

function Parts({ parts }: { parts: Part[] }) {
  return parts.map((part, index) => {
    const names = [`by-${part.author}`, part.isTag ? "diff-tag" : "", part.within === "answer" ? "diff-answer" : ""];
    const className = names.filter(Boolean).join(" ");
    if (part.change === "removed") {
      return (
        <del key={index} className={className}>
          {part.text}
        </del>
      );
    }
    if (part.change === "added") {
      return (
        <ins key={index} className={className}>
          {part.text}
        </ins>
      );
    }
    return (
      <span key={index} className={className}>
        {part.text}
      </span>
    );
  });
}

function Text({ label, parts }: { label: string; parts: Part[] }) {
  return (
    <div className="diff-text card" role="region" aria-label={label} data-testid="diff-text">
      {parts.length === 0 ? <span className="quiet">nothing was written</span> : <Parts parts={parts} />}
    </div>
  );
}

interface Props {
  diff: TextDiff;
  /** In one column, with both texts in one; else beside each other. */
  isUnified: boolean;
  /** What stands above each side. */
  older: ReactNode;
  newer: ReactNode;
}

/** Two texts with what only one of them has: struck out in the older, underlined in the newer. */
export function DiffView({ diff, isUnified, older, newer }: Props) {
  const isEqual = diff.unified.every(({ change }) => change === "same");
  const note = diff.isWhole
    ? "The texts have so little in common that all of both is marked."
    : isEqual
      ? "The texts are equal."
      : null;
  return (
    <div data-testid="diff" data-unified={isUnified}>
      {note !== null && <p className="quiet diff-note">{note}</p>}
      {isUnified ? (
        <div className="diff-one">
          {older}
          {newer}
          <Text label="Both texts in one" parts={diff.unified} />
        </div>
      ) : (
        <div className="diff-two">
          <div>
            {older}
            <Text label="Older text" parts={diff.left} />
          </div>
          <div>
            {newer}
            <Text label="Newer text" parts={diff.right} />
          </div>
        </div>
      )}
    </div>
  );
}
