import { Fragment, memo, type ReactNode } from "react";
import type { TextRange } from "./gold";
import type { Unit } from "./layout";
import { Marked } from "./Marked";

const NONE: readonly TextRange[] = [];

/** A stretch of text, token by token. `colours`: class of each token of the response. */
export const Units = memo(function Units({
  units,
  colours,
  found = NONE,
}: {
  units: readonly Unit[];
  colours: readonly string[];
  found?: readonly TextRange[];
}) {
  let offset = 0;
  return (
    <div className="units">
      {units.map((unit, place) => {
        const begin = offset;
        offset += unit.text.length;
        const colour = unit.token === null ? "" : (colours[unit.token] ?? "");
        const className = joinClasses(unit.className, colour);
        return (
          <span key={place} data-token={unit.token ?? undefined} className={className === "" ? undefined : className}>
            {showUnit(unit, found, begin)}
          </span>
        );
      })}
    </div>
  );
});

/** A coloured tag is not set back: its colour needs text that can be read. */
export function joinClasses(own: string, colour: string): string {
  return colour === "" ? own : own === "" || own === "tag" ? colour : `${own} ${colour}`;
}

function showUnit({ text, gold, shown }: Unit, found: readonly TextRange[], offset: number): ReactNode {
  if (gold.length > 0 || found.length > 0) {
    // What is hidden at the ends is blank: nothing there can be marked.
    const visible = text.slice(shown.begin, shown.end);
    const moved = gold.map(({ begin, end }) => ({ begin: begin - shown.begin, end: end - shown.begin }));
    return <Marked text={visible} gold={moved} found={found} offset={offset + shown.begin} />;
  }
  if (!text.includes("\n")) return text;
  const lines = text.slice(shown.begin, shown.end).split("\n");
  return (
    <>
      {shown.begin > 0 && <i className="line-end" />}
      {lines.map((line, place) => (
        <Fragment key={place}>
          {line}
          {place < lines.length - 1 && (
            <>
              <i className="line-end" />
              {"\n"}
            </>
          )}
        </Fragment>
      ))}
      {shown.end < text.length && shown.end > 0 && <i className="line-end" />}
    </>
  );
}
