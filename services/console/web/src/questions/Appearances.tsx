import type { Model } from "../api/client";
import { formatScore } from "../ui/format";
import { isRight } from "./diff";

const BAR = 7;
const HEIGHT = 22;
const SHOWN = 24;

/** The appearances of a question as bars: as high as its exact match, wrong ones a stump; the last ones, if many. */
export function Appearances({ points }: { points: Model<"QuestionPoint">[] }) {
  const shown = points.slice(-SHOWN);
  const words = shown.map((point) => `step ${point.step}: ${formatScore(point.em, 0)}`).join(", ");
  return (
    <svg width={shown.length * BAR + 2} height={HEIGHT} role="img" aria-label={`exact match at ${words}`}>
      <title>{words}</title>
      {shown.map((point, index) => {
        const height = point.em === null ? 2 : Math.max(3, point.em * HEIGHT);
        const right = isRight(point);
        return (
          <rect
            key={index}
            x={index * BAR + 1}
            y={HEIGHT - height}
            width={BAR - 2}
            height={height}
            fill={right === null ? "var(--line)" : right ? "var(--good)" : "var(--bad)"}
          />
        );
      })}
    </svg>
  );
}
