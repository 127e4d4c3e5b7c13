import type { Part } from "../questions/diff";
import "./trajectory.css";

/** Two texts in one: what only the first has struck out, what only the second has underlined. */
export function TextChanges({ parts, isWhole }: { parts: readonly Part[]; isWhole: boolean }) {
  return (
    <div className="changes mono" data-testid="changes">
      {isWhole && <p className="quiet">The texts have little in common: each is shown whole.</p>}
      {parts.map(({ text, change, author }, place) => {
        const className = author === "env" ? "env" : undefined;
        if (change === "removed")
          return (
            <del key={place} className={className}>
              {text}
            </del>
          );
        if (change === "added")
          return (
            <ins key={place} className={className}>
              {text}
            </ins>
          );
        return (
          <span key={place} className={className}>
            {text}
          </span>
        );
      })}
    </div>
  );
}
