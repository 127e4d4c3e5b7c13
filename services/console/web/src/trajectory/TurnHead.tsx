import { Badge, Group, UnstyledButton } from "@mantine/core";
import { useState } from "react";
import { explainAdvantage, formatSigned, type Credit } from "./credit";
import type { Row } from "./layout";

interface Props {
  row: Row & { kind: "head" };
  credit: Credit;
  /** The critic's mean value over the turn. */
  value: number | null;
  showsPassages: boolean;
  onShowPassages: (shows: boolean) => void;
}

/** What a turn did and how it was credited, or what an observation is. */
export function TurnHead({ row, credit, value, showsPassages, onShowPassages }: Props) {
  const { block, turn, hasPassages } = row;
  const [isExplained, setExplained] = useState(false);
  if (block.author === "env") {
    return (
      <Group gap="xs" className="turn-head">
        <b style={{ color: "var(--author-env)" }}>Observation{block.turn === null ? "" : ` of turn ${block.turn}`}</b>
        {turn !== null && <span className="quiet">{describeRetrieval(turn)}</span>}
        {hasPassages && (
          <UnstyledButton
            className="text-button"
            onClick={() => {
              onShowPassages(!showsPassages);
            }}
          >
            {showsPassages ? "as the policy read it" : "as passages"}
          </UnstyledButton>
        )}
      </Group>
    );
  }
  const isSearch = turn !== null && turn.tag !== "" && turn.action.toLowerCase().includes("search");
  return (
    <div className="turn-head">
      <Group gap="xs">
        <b style={{ color: "var(--author-model)" }}>Turn{block.turn === null ? "" : ` ${block.turn}`}</b>
        {turn !== null && <span className="quiet">{describeAction(turn)}</span>}
        {turn?.advantage != null && (
          <Badge
            size="sm"
            className={turn.advantage > 0 ? "plus-6" : turn.advantage < 0 ? "minus-6" : "zero"}
            style={{ color: "var(--ink)" }}
            data-testid="turn-advantage"
          >
            advantage {formatSigned(turn.advantage)}
          </Badge>
        )}
        {turn !== null && credit.trained !== null && (
          <UnstyledButton
            className="text-button"
            aria-expanded={isExplained}
            onClick={() => {
              setExplained(!isExplained);
            }}
          >
            why?
          </UnstyledButton>
        )}
      </Group>
      {isExplained && turn !== null && (
        <p className="hint" data-testid="turn-why">
          {explainAdvantage(isSearch ? "This search" : "This turn", turn.advantage, credit, value)}
        </p>
      )}
    </div>
  );
}

type Turn = NonNullable<Props["row"]["turn"]>;

function describeAction(turn: Turn): string {
  const action = turn.tag === "" ? "no valid action" : turn.tag;
  const notes = [action];
  if (turn.tag !== "" && !turn.executed && !turn.action.toLowerCase().includes("answer")) notes.push("not executed");
  if (turn.context_begin > 0) notes.push(`sampled without the first ${turn.context_begin} tokens`);
  return notes.join(" · ");
}

function describeRetrieval(turn: Turn): string {
  const notes: string[] = [];
  if (turn.passages.length > 0)
    notes.push(turn.passages.length === 1 ? "1 passage" : `${turn.passages.length} passages`);
  if (turn.mode !== "") notes.push(turn.mode);
  if (turn.retrieval_status !== null && turn.retrieval_status !== "OK")
    notes.push(`retrieval: ${turn.retrieval_status}`);
  if (turn.is_partial) notes.push("a shard of the index was unavailable");
  return notes.join(" · ");
}
