import { Text } from "@mantine/core";
import { formatDuration } from "../ui/format";

/** Names of the parts of a step's time as the trainer writes them, in words. */
const PARTS: Record<string, string> = {
  wait: "waiting for trajectories",
  logp: "log-probabilities",
  ref: "reference",
  values: "values",
  critic: "critic",
  probe: "probe",
  update: "update",
  publish: "publishing",
  checkpoint: "checkpoint",
  validation: "validation",
};

/** Splits a step's time into its parts, the largest first; what no part accounts for is the rest. */
function splitTime(seconds: Record<string, number>): { name: string; seconds: number }[] {
  const { total, ...parts } = seconds;
  const known = Object.entries(parts)
    .filter(([, value]) => value > 0)
    .map(([name, value]) => ({ name: PARTS[name] ?? name, seconds: value }))
    .toSorted((a, b) => b.seconds - a.seconds);
  const rest = (total ?? 0) - known.reduce((sum, part) => sum + part.seconds, 0);
  return rest > 0.01 * (total ?? 0) ? [...known, { name: "other", seconds: rest }] : known;
}

export function TimeBar({ seconds }: { seconds: Record<string, number> }) {
  const parts = splitTime(seconds);
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  if (total <= 0) return <Text className="quiet">No times are known.</Text>;
  return (
    <div data-testid="time-bar">
      <div className="time-bar" aria-hidden="true">
        {parts.map((part, index) => (
          <div
            key={part.name}
            title={`${part.name}: ${formatDuration(part.seconds)}`}
            style={{ flexGrow: part.seconds, background: `var(--series-${index % 6})` }}
          />
        ))}
      </div>
      <ul className="time-legend">
        {parts.map((part, index) => (
          <li key={part.name}>
            <span className="time-swatch" style={{ background: `var(--series-${index % 6})` }} /> {part.name}{" "}
            <span className="number quiet">
              {formatDuration(part.seconds)}, {((100 * part.seconds) / total).toFixed(0)} %
            </span>
          </li>
        ))}
      </ul>
    </div>
  );
}
