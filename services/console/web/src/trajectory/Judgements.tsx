import { Button, Text } from "@mantine/core";
import { useState } from "react";
import { api, type Model } from "../api/client";
import { describeError } from "../api/errors";
import { formatNumber } from "../ui/format";
import { formatSigned } from "./credit";

type Judgement = Model<"Judgement">;

interface Props {
  run: string;
  place: string;
  row: number;
  judgement: Judgement;
  validation: Judgement | null;
}

/** The reward with its components, exact match, and on demand the rules that made them. */
export function Judgements({ run, place, row, judgement, validation }: Props) {
  const [isWanted, setWanted] = useState(false);
  const explanation = api.useQuery(
    "get",
    "/api/runs/{run}/trajectories/{place}/{row}/explanation",
    { params: { path: { run, place, row } } },
    { enabled: isWanted },
  );
  return (
    <section aria-label="Reward" data-testid="reward">
      <h2>
        Reward <span className="number">{formatNumber(judgement.total)}</span>{" "}
        <span className="quiet">{judgement.reward}</span>
      </h2>
      {judgement.status !== "OK" && <p className="hint bad">{judgement.status}</p>}
      {judgement.detail !== "" && <p className="hint">{judgement.detail}</p>}
      {judgement.components.length > 0 && (
        <table className="small-table">
          <thead>
            <tr>
              <th scope="col">component</th>
              <th scope="col" className="number">
                value
              </th>
              <th scope="col" className="number">
                adds
              </th>
            </tr>
          </thead>
          <tbody>
            {judgement.components.map(({ name, raw, weighted }) => (
              <tr key={name}>
                <td>{name}</td>
                <td className="number">{formatNumber(raw)}</td>
                <td className="number">{formatSigned(weighted, 4)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {validation !== null && (
        <p className="hint quiet">
          Exact match, for comparison with validations: {formatNumber(validation.total)}
          {validation.detail === "" ? "" : ` (${validation.detail})`}
        </p>
      )}
      {explanation.data === undefined ? (
        <Button
          variant="default"
          size="compact-xs"
          mt={6}
          loading={isWanted && explanation.isFetching}
          onClick={() => {
            if (isWanted) void explanation.refetch();
            else setWanted(true);
          }}
        >
          Explain this reward
        </Button>
      ) : (
        <div data-testid="explanation">
          <pre className="explanation">{explanation.data.text}</pre>
          {explanation.data.is_live && (
            <Text size="xs" className="quiet">
              By the reward service of this run, now.
            </Text>
          )}
        </div>
      )}
      {explanation.error !== null && <p className="hint bad">{describeError(explanation.error)}</p>}
    </section>
  );
}
