import { ScrollArea, UnstyledButton, VisuallyHidden } from "@mantine/core";
import { useEffect, useRef } from "react";
import { formatScore } from "../ui/format";
import { isRight, nameOf, type Point } from "./diff";

const KINDS: Record<string, string> = { validation: "validation", watch: "watched", train: "training" };

/** Names an appearance in words. */
export function describePoint(point: Point): string {
  const kind = KINDS[point.kind] ?? point.kind;
  return point.place.startsWith("step-") && point.kind !== "validation"
    ? `${kind}, step ${point.step}`
    : `${kind} ${point.place}, step ${point.step}`;
}

function Outcome({ point }: { point: Point }) {
  const right = isRight(point);
  if (right === null) return <span className="quiet">?</span>;
  const isPartly = right && (point.em ?? 0) < 1;
  return (
    <span className={right ? "strip-right" : "strip-wrong"}>
      {isPartly ? formatScore(point.em, 0) : right ? "✓" : "✗"}
    </span>
  );
}

interface Props {
  points: Point[];
  a: number;
  b: number;
  /** Chooses the newer side, with Shift the older. */
  onChoose: (name: string, isOlder: boolean) => void;
}

/** All appearances of a question in their order; the two that are compared are marked A and B. */
export function Strip({ points, a, b, onChoose }: Props) {
  const chosen = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    chosen.current?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [b]);
  return (
    <ScrollArea type="auto" offsetScrollbars="x">
      <div className="strip" role="group" aria-label="Appearances of the question" data-testid="strip">
        {points.map((point, index) => {
          const side = index === a && index === b ? "A B" : index === a ? "A" : index === b ? "B" : "";
          return (
            <UnstyledButton
              key={nameOf(point)}
              ref={index === b ? chosen : undefined}
              className="strip-point"
              data-side={side || undefined}
              data-kind={point.kind}
              aria-pressed={index === b}
              onClick={(event) => {
                onChoose(nameOf(point), event.shiftKey);
              }}
            >
              <Outcome point={point} />
              <span className="number">{point.step}</span>
              <span className="strip-kind quiet">{point.kind === "validation" ? point.place : KINDS[point.kind]}</span>
              <span className="strip-side">{side || " "}</span>
              <VisuallyHidden>
                {`${describePoint(point)}: exact match ${formatScore(point.em, 0)}${side === "" ? "" : `, side ${side}`}`}
              </VisuallyHidden>
            </UnstyledButton>
          );
        })}
      </div>
    </ScrollArea>
  );
}
