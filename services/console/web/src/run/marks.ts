// The events of a run as marks in its curves.
import type { Model } from "../api/client";
import type { CurveMark } from "../ui/Curve";

interface MarkKind {
  kind: string;
  label: string;
  color: string;
  /** Many: drawn as ticks at the foot. */
  small: boolean;
}

/** Kinds in the order of the legend. "saved" is not an event: the trajectories of these steps are kept. */
const KINDS: MarkKind[] = [
  { kind: "saved", label: "trajectories kept", color: "--accent", small: true },
  { kind: "validation", label: "validation", color: "--series-1", small: true },
  { kind: "watch", label: "watched questions asked", color: "--series-3", small: true },
  { kind: "checkpoint", label: "checkpoint", color: "--quiet", small: true },
  { kind: "best checkpoint", label: "best checkpoint", color: "--series-2", small: true },
  { kind: "guard", label: "guard", color: "--warn", small: false },
  { kind: "rollback", label: "rollback", color: "--bad", small: false },
  { kind: "restart", label: "restart", color: "--series-5", small: false },
  { kind: "resume", label: "resumed", color: "--info", small: false },
];

function findKind(kind: string): MarkKind {
  return KINDS.find((known) => known.kind === kind) ?? { kind, label: kind, color: "--quiet", small: false };
}

interface Place {
  kind: string;
  step: number;
}

function listPlaces(detail: Pick<Model<"RunDetail">, "marks" | "saved_steps">): Place[] {
  // Start and end are where the curves begin and end.
  const events = detail.marks.filter(({ kind }) => kind !== "start" && kind !== "end");
  return [...detail.saved_steps.map((step) => ({ kind: "saved", step })), ...events];
}

/** Counts the marks by kind, for the legend; kinds that a run has not are left out. */
export function countKinds(
  detail: Pick<Model<"RunDetail">, "marks" | "saved_steps">,
): (MarkKind & { count: number })[] {
  const counts = new Map<string, number>();
  for (const { kind } of listPlaces(detail)) counts.set(kind, (counts.get(kind) ?? 0) + 1);
  const others = [...counts.keys()].filter((kind) => KINDS.every((known) => known.kind !== kind));
  return [...KINDS.map(({ kind }) => kind), ...others]
    .map((kind) => ({ ...findKind(kind), count: counts.get(kind) ?? 0 }))
    .filter(({ count }) => count > 0);
}

/** Makes the marks of the curves; several of one kind at one step are one, with their number. */
export function makeMarks(detail: Pick<Model<"RunDetail">, "marks" | "saved_steps">, hidden: string[]): CurveMark[] {
  const found = new Map<string, { place: Place; count: number }>();
  for (const place of listPlaces(detail)) {
    if (hidden.includes(place.kind)) continue;
    const key = `${place.step} ${place.kind}`;
    const known = found.get(key);
    if (known === undefined) found.set(key, { place, count: 1 });
    else known.count += 1;
  }
  return [...found.values()].map(({ place, count }) => {
    const { label, color, small } = findKind(place.kind);
    return { x: place.step, label: count > 1 ? `${count} × ${label}` : label, color, small };
  });
}
