import { Badge, Checkbox, Group } from "@mantine/core";
import { useMemo } from "react";
import { Link } from "react-router";
import { formatNumber } from "../ui/format";
import { formatSigned } from "./credit";
import type { TextRange } from "./gold";
import { layOut, type Detail, type Unit } from "./layout";
import { Passages } from "./Passages";
import { joinClasses } from "./Units";

interface Props {
  detail: Detail;
  colours: readonly string[];
  isColoured: boolean;
  showsPassages: boolean;
  findGold: (text: string) => TextRange[];
  to: string;
  isChosen: boolean;
  onChoose: (isChosen: boolean) => void;
}

/** One sample of a group, short: no head for each turn, and neighbours of the same colour as one. */
export function SampleColumn({ detail, colours, isColoured, showsPassages, findGold, to, isChosen, onChoose }: Props) {
  const { summary } = detail;
  const rows = useMemo(() => layOut(detail, showsPassages), [detail, showsPassages]);
  const isRight = summary.em === null ? null : summary.em > 0;
  return (
    <article className="card sample" aria-label={`Sample ${summary.sample}`} data-testid="sample">
      <header>
        <Group justify="space-between" wrap="nowrap" gap="xs">
          <Link to={to} className="sample-name">
            Sample {summary.sample}
          </Link>
          <Checkbox
            size="xs"
            label="compare"
            checked={isChosen}
            onChange={(event) => {
              onChoose(event.currentTarget.checked);
            }}
          />
        </Group>
        <Group gap={6} mt={2}>
          {summary.advantage !== null && (
            <Badge
              size="sm"
              className={summary.advantage > 0 ? "plus-6" : summary.advantage < 0 ? "minus-6" : "zero"}
              style={{ color: "var(--ink)" }}
            >
              advantage {formatSigned(summary.advantage)}
            </Badge>
          )}
          <span className="number">reward {formatNumber(summary.reward, 3)}</span>
          {isRight !== null && <span className={isRight ? "good" : "bad"}>{isRight ? "right" : "wrong"}</span>}
        </Group>
        <div className="quiet number">
          {summary.searches} {summary.searches === 1 ? "search" : "searches"}
          {summary.tokens !== null && ` · ${formatNumber(summary.tokens)} tokens`}
          {summary.truncated && " · truncated"}
          {summary.status !== "OK" && ` · ${summary.status}`}
          {summary.trained === false && " · not trained on"}
        </div>
      </header>
      <div className={`sample-text ${isColoured ? "coloured" : ""}`}>
        {rows.map((row) =>
          row.kind === "text" ? (
            <div key={row.key} className="stretch" data-author={row.author}>
              <Runs units={row.units} colours={colours} />
            </div>
          ) : row.kind === "passages" ? (
            <div key={row.key} className="stretch" data-author="env">
              <Passages passages={row.turn.passages} findGold={findGold} />
            </div>
          ) : null,
        )}
      </div>
    </article>
  );
}

/** Units of the same class as one element: a page with all samples has many times more tokens than that of one. */
export function joinUnits(units: readonly Unit[], colours: readonly string[]): { className: string; text: string }[] {
  const runs: { className: string; text: string }[] = [];
  for (const unit of units) {
    const colour = unit.token === null ? "" : (colours[unit.token] ?? "");
    const className = joinClasses(unit.className, colour);
    const text = unit.text.slice(unit.shown.begin, unit.shown.end);
    const last = runs.at(-1);
    if (last?.className === className) last.text += text;
    else runs.push({ className, text });
  }
  return runs;
}

function Runs({ units, colours }: { units: readonly Unit[]; colours: readonly string[] }) {
  return (
    <div className="units">
      {joinUnits(units, colours).map(({ className, text }, place) => (
        <span key={place} className={className}>
          {text}
        </span>
      ))}
    </div>
  );
}
