import { Link } from "react-router";
import { formatNumber } from "../ui/format";
import { computeAdvantage, describeEstimator, describeRewards, formatSigned } from "./credit";
import type { Sample } from "./layout";

interface Props {
  estimator: string | null;
  baseline: number | null;
  deviation: number | null;
  samples: readonly Sample[];
  /** Mean advantage of each turn, for each sample. */
  turns: readonly (readonly (number | null)[])[];
  link: (sample: Sample) => string;
}

const MAX_TURNS = 8;

/** The samples that took part in the baseline. */
export function countedRewards(samples: readonly Sample[]): number[] {
  return samples.flatMap(({ reward, trained, status }) =>
    reward === null || trained === false || status !== "OK" ? [] : [reward],
  );
}

/** From rewards to advantages: the formula in words, a figure, and the sums of each sample. */
export function GroupSums({ estimator, baseline, deviation, samples, turns, link }: Props) {
  const method = describeEstimator(estimator, deviation !== null);
  const rewards = countedRewards(samples);
  const sums = samples.map(({ reward }) =>
    reward === null ? null : computeAdvantage(estimator, rewards, reward, baseline, deviation),
  );
  const hasSums = sums.some((sum) => sum !== null);
  const turnCount = turns.some(areUnequal) ? Math.min(MAX_TURNS, Math.max(...turns.map(({ length }) => length))) : 0;
  const turnNumbers = Array.from({ length: turnCount }, (_, place) => place);
  const isScaled = hasSums && deviation !== null && estimator !== "rloo";
  return (
    <section className="card panel-like" aria-label="What made the advantages" data-testid="group-sums">
      <h2>
        {method.title}: {rewards.length > 0 ? describeRewards(rewards) : "no sample has a reward"}
      </h2>
      {method.formula !== "" && <p className="hint mono">{method.formula}</p>}
      <p className="hint quiet">{method.words}</p>
      {rewards.length > 1 && <Spread samples={samples} baseline={mean(rewards)} deviation={deviation} />}
      <div className="scroll-x">
        <table className="small-table">
          <thead>
            <tr>
              <th scope="col">sample</th>
              <th scope="col" className="number">
                reward
              </th>
              {hasSums && (
                <>
                  <th scope="col" className="number">
                    {estimator === "rloo" ? "− mean of the others" : "− mean"}
                  </th>
                  <th scope="col" className="number">
                    = difference
                  </th>
                </>
              )}
              {isScaled && (
                <th scope="col" className="number">
                  ÷ deviation
                </th>
              )}
              <th
                scope="col"
                className="number"
                title="mean over the tokens that were trained on, as the step stored it"
              >
                {hasSums ? "= advantage" : "mean advantage"}
              </th>
              {turnNumbers.map((turn) => (
                <th key={turn} scope="col" className="number" title="mean advantage of the turn">
                  turn {turn + 1}
                </th>
              ))}
              <th scope="col">answer</th>
            </tr>
          </thead>
          <tbody>
            {samples.map((sample, place) => {
              const sum = sums[place] ?? null;
              return (
                <tr key={sample.row} data-testid="group-sum">
                  <td>
                    <Link to={link(sample)}>{sample.sample}</Link>
                  </td>
                  <td className="number">{formatNumber(sample.reward, 3)}</td>
                  {hasSums && (
                    <>
                      <td className="number quiet">{formatNumber(sum?.baseline, 3)}</td>
                      <td className="number">{formatSigned(sum?.difference)}</td>
                    </>
                  )}
                  {isScaled && <td className="number quiet">{formatNumber(deviation, 3)}</td>}
                  <td className="number">
                    <b>{formatSigned(sample.advantage)}</b>
                  </td>
                  {turnNumbers.map((turn) => (
                    <td key={turn} className="number">
                      {formatSigned(turns[place]?.[turn])}
                    </td>
                  ))}
                  <td>
                    <span className={sample.em === null ? "" : sample.em > 0 ? "good" : "bad"}>
                      {sample.answer ?? (sample.status === "OK" ? "no answer" : sample.status)}
                    </span>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {hasDifference(sums, samples) && (
        <p className="hint quiet">
          The stored advantages are not these sums: something else counted too, such as a penalty on KL or on
          overconfidence.
        </p>
      )}
    </section>
  );
}

/** Whether the turns of a sample were credited differently, by more than rounding. */
export function areUnequal(advantages: readonly (number | null)[]): boolean {
  const known = advantages.filter((one) => one !== null);
  return known.length > 1 && Math.max(...known) - Math.min(...known) > 1e-3 * Math.max(...known.map(Math.abs));
}

function mean(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** Whether a stored advantage is not what the sums say, by more than rounding. */
export function hasDifference(sums: readonly ({ advantage: number } | null)[], samples: readonly Sample[]): boolean {
  return samples.some(({ advantage }, place) => {
    const sum = sums[place];
    return (
      sum != null && advantage !== null && Math.abs(sum.advantage - advantage) > 0.01 * Math.max(1, Math.abs(advantage))
    );
  });
}

const WIDTH = 480;
const HEIGHT = 64;
const MARGIN = 24;

/** The rewards on a line, with their mean and one deviation to each side. */
function Spread({
  samples,
  baseline,
  deviation,
}: {
  samples: readonly Sample[];
  baseline: number;
  deviation: number | null;
}) {
  const known = samples.flatMap(({ reward }) => (reward === null ? [] : [{ reward }]));
  const low = Math.min(...known.map(({ reward }) => reward));
  const high = Math.max(...known.map(({ reward }) => reward));
  const pad = high > low ? 0.15 * (high - low) : 1;
  const x = (value: number) => {
    const share = (value - (low - pad)) / (high - low + 2 * pad);
    return MARGIN + Math.min(1, Math.max(0, share)) * (WIDTH - 2 * MARGIN);
  };
  const counts = new Map<number, number>();
  for (const { reward } of known) counts.set(reward, (counts.get(reward) ?? 0) + 1);
  const text = `Rewards from ${formatNumber(low, 3)} to ${formatNumber(high, 3)}, mean ${formatNumber(baseline, 3)}`;
  return (
    <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} className="spread" role="img" aria-label={text}>
      {deviation !== null && (
        <rect
          x={x(baseline - deviation)}
          width={x(baseline + deviation) - x(baseline - deviation)}
          y={12}
          height={30}
          fill="var(--shade)"
        >
          <title>one standard deviation to each side of the mean</title>
        </rect>
      )}
      <line x1={MARGIN / 2} x2={WIDTH - MARGIN / 2} y1={42} y2={42} stroke="var(--line)" />
      <line x1={x(baseline)} x2={x(baseline)} y1={27} y2={46} stroke="var(--ink)" strokeDasharray="3 3" />
      <text x={x(baseline)} y={60} textAnchor="middle" className="axis">
        mean {formatNumber(baseline, 3)}
      </text>
      {[...counts].map(([reward, count]) => {
        const fill = reward > baseline ? "var(--series-1)" : reward < baseline ? "var(--series-4)" : "var(--quiet)";
        return (
          <g key={reward}>
            <circle cx={x(reward)} cy={34} r={5} fill={fill} />
            <text x={x(reward)} y={24} textAnchor="middle" className="axis">
              {count > 1 ? `${count} × ` : ""}
              {formatNumber(reward, 3)}
            </text>
          </g>
        );
      })}
    </svg>
  );
}
