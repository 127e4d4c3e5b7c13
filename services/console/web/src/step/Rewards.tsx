import { formatNumber } from "../ui/format";
import { placeDots } from "./groups";

const WIDTH = 130;
const RADIUS = 3;
const MARGIN = 5;

/** The rewards of a group as dots on the scale of the step; equal ones are stacked. */
export function Rewards({
  rewards,
  range,
}: {
  rewards: readonly (number | null)[];
  range: { low: number; high: number };
}) {
  const dots = placeDots(rewards, range);
  const unknown = rewards.length - dots.length;
  // Groups may be large: beyond five, dots of a stack overlap.
  const highest = Math.max(0, ...dots.map(({ level }) => level));
  const gap = Math.min(6, 24 / Math.max(1, highest));
  const words = rewards.map((reward) => formatNumber(reward, 3)).join(", ");
  const text = `rewards ${words}`;
  return (
    <svg width={WIDTH} height={34} role="img" aria-label={text}>
      <title>{text}</title>
      <line x1={MARGIN} x2={WIDTH - MARGIN - 22} y1={31} y2={31} stroke="var(--line)" />
      {dots.map(({ x, level }, index) => (
        <circle
          key={index}
          cx={MARGIN + x * (WIDTH - 2 * MARGIN - 22)}
          cy={27 - gap * level}
          r={RADIUS}
          fill="var(--series-1)"
          fillOpacity={0.75}
        />
      ))}
      {unknown > 0 && (
        <text x={WIDTH} y={28} textAnchor="end" fontSize="10" fill="var(--quiet)">
          {unknown} ?
        </text>
      )}
    </svg>
  );
}
