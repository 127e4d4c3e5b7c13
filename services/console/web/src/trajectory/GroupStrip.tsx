import { Anchor } from "@mantine/core";
import { Link } from "react-router";
import { paths } from "../app/paths";
import { formatNumber } from "../ui/format";
import type { Sample } from "./layout";

interface Props {
  run: string;
  place: string;
  uid: string;
  /** Number of the trajectory that is shown. */
  row: number;
  samples: readonly Sample[];
}

/** The rewards of all samples of the group; each leads to its trajectory. */
export function GroupStrip({ run, place, uid, row, samples }: Props) {
  if (samples.length < 2) return null;
  return (
    <div data-testid="group-strip">
      <ul className="strip" aria-label="Samples of the group">
        {samples.map((sample) => (
          <li key={sample.row}>
            <Link
              to={paths.trajectory(run, sample.place, sample.row, { colour: "advantage" })}
              className="number"
              aria-current={sample.row === row ? "true" : undefined}
              title={`sample ${sample.sample}: reward ${formatNumber(sample.reward)}, answer ${sample.answer ?? "none"}`}
              data-right={sample.em === null ? undefined : sample.em > 0}
            >
              {formatNumber(sample.reward, 3)}
            </Link>
          </li>
        ))}
      </ul>
      <Anchor component={Link} to={paths.group(run, place, uid)} size="sm">
        All {samples.length} samples side by side
      </Anchor>
    </div>
  );
}
