import type { Values } from "./curveData";
import { formatNumber } from "./format";

interface Props {
  values: Values;
  label: string;
  width?: number;
  height?: number;
  format?: (value: number | null) => string;
}

/** A curve as small as a word; gaps stay gaps. */
export function Sparkline({ values, label, width = 96, height = 24, format = formatNumber }: Props) {
  const known = values.filter((value): value is number => value !== null);
  if (known.length === 0) return <span className="quiet">–</span>;
  const low = Math.min(...known);
  const range = Math.max(...known) - low || 1;
  const place = (value: number, position: number): [number, number] => [
    2 + (position / Math.max(1, values.length - 1)) * (width - 4),
    height - 3 - ((value - low) / range) * (height - 6),
  ];
  const pieces: string[] = [];
  let connects = false;
  let end: [number, number] = [0, 0];
  values.forEach((value, position) => {
    if (value === null) {
      connects = false;
      return;
    }
    end = place(value, position);
    pieces.push(`${connects ? "L" : "M"}${end.map((coordinate) => coordinate.toFixed(1)).join(" ")}`);
    connects = true;
  });
  const text = `${label}: ${format(known[0] ?? null)} to ${format(known.at(-1) ?? null)}, highest ${format(Math.max(...known))}`;
  return (
    <svg width={width} height={height} role="img" aria-label={text} style={{ display: "block" }}>
      <path d={pieces.join("")} fill="none" stroke="var(--series-0)" strokeWidth="1.5" strokeLinejoin="round" />
      <circle cx={end[0]} cy={end[1]} r="2" fill="var(--series-0)" />
    </svg>
  );
}
