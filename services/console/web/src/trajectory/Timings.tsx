import type { Model } from "../api/client";
import { formatDuration } from "../ui/format";

export interface Part {
  name: string;
  seconds: number;
  colour: string;
}

/** The parts of a trajectory's time; what none of them covers is `other`. */
export function listParts(timings: Model<"TimingBar">): Part[] {
  const parts = [
    { name: "queued", seconds: timings.queued_s, colour: "var(--series-2)" },
    { name: "generate", seconds: timings.generate_s, colour: "var(--series-3)" },
    { name: "retrieve", seconds: timings.retrieve_s, colour: "var(--series-5)" },
    { name: "score", seconds: timings.score_s, colour: "var(--series-0)" },
  ];
  const known = parts.reduce((sum, { seconds }) => sum + seconds, 0);
  const other = timings.total_s - known;
  // Less than one in a hundred is rounding.
  if (other > 0.01 * timings.total_s) parts.push({ name: "other", seconds: other, colour: "var(--quiet)" });
  return parts;
}

/** Where a trajectory's time went, as a bar and in numbers. */
export function Timings({ timings }: { timings: Model<"TimingBar"> }) {
  const parts = listParts(timings);
  const total = parts.reduce((sum, { seconds }) => sum + seconds, 0);
  return (
    <section aria-label="Timings" data-testid="timings">
      <h2>
        Time <span className="number">{formatDuration(total)}</span>
      </h2>
      <div className="timings" aria-hidden="true">
        {parts.map(({ name, seconds, colour }) => (
          <div key={name} style={{ width: `${total > 0 ? (100 * seconds) / total : 0}%`, background: colour }} />
        ))}
      </div>
      <dl className="facts" style={{ marginTop: 6 }}>
        {parts.map(({ name, seconds, colour }) => (
          <div key={name}>
            <dt>
              <span aria-hidden="true" style={{ color: colour }}>
                ■
              </span>{" "}
              {name}
            </dt>
            <dd>{formatDuration(seconds)}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
