import { Text } from "@mantine/core";
import type { Model } from "../api/client";
import { formatNumber } from "../ui/format";

const WIDTH = 600;
const HEIGHT = 130;

/** The advantages of the tokens that were trained on; bars above 0 and below have different colours. */
export function Histogram({ bins }: { bins: Model<"Bin">[] }) {
  const first = bins[0];
  const last = bins.at(-1);
  if (first === undefined || last === undefined) {
    return <Text className="quiet">No token of this step was trained on.</Text>;
  }
  const total = bins.reduce((sum, bin) => sum + bin.count, 0);
  const most = Math.max(1, ...bins.map((bin) => bin.count));
  const range = last.high - first.low || 1;
  const place = (value: number) => ((value - first.low) / range) * WIDTH;
  const above = bins.filter((bin) => bin.low + bin.high > 0).reduce((sum, bin) => sum + bin.count, 0);
  const text =
    `advantages of ${formatNumber(total)} tokens, from ${formatNumber(first.low, 3)} to ${formatNumber(last.high, 3)}; ` +
    `${((100 * above) / Math.max(1, total)).toFixed(0)} % above 0`;
  return (
    <figure className="histogram" data-testid="histogram">
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={text} preserveAspectRatio="none">
        {bins.map((bin) => {
          const height = (HEIGHT * bin.count) / most;
          const shown = bin.count > 0 ? Math.max(1, height) : 0;
          return (
            <rect
              key={bin.low}
              x={place(bin.low) + 0.5}
              y={HEIGHT - shown}
              width={Math.max(1, place(bin.high) - place(bin.low) - 1)}
              height={shown}
              fill={bin.low + bin.high > 0 ? "var(--positive)" : "var(--negative)"}
            >
              <title>
                {formatNumber(bin.low, 3)} to {formatNumber(bin.high, 3)}: {formatNumber(bin.count)} tokens
              </title>
            </rect>
          );
        })}
        <line x1={0} x2={WIDTH} y1={HEIGHT} y2={HEIGHT} stroke="var(--line)" />
        {first.low < 0 && last.high > 0 && (
          <line x1={place(0)} x2={place(0)} y1={0} y2={HEIGHT} stroke="var(--quiet)" strokeDasharray="3 3" />
        )}
      </svg>
      <div className="histogram-axis quiet number" aria-hidden="true">
        <span>{formatNumber(first.low, 3)}</span>
        {first.low < 0 && last.high > 0 && (
          <span style={{ position: "absolute", left: `${place(0) / (WIDTH / 100)}%` }}>0</span>
        )}
        <span>{formatNumber(last.high, 3)}</span>
      </div>
      <figcaption className="quiet">{text}</figcaption>
    </figure>
  );
}
