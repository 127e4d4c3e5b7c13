import { ActionIcon, Group, Text } from "@mantine/core";
import { useState } from "react";
import { useHotkeys } from "../ui/hotkeys";
import { SearchInput } from "../ui/SearchInput";

interface Props {
  find: string;
  onFind: (text: string) => void;
  count: number;
  onGo: (match: number) => void;
}

/** Looks for a text in the whole trajectory, in what is not drawn too. */
export function FindBar({ find, onFind, count, onGo }: Props) {
  const [current, setCurrent] = useState(-1);
  const [known, setKnown] = useState(`${find} ${count}`);
  if (known !== `${find} ${count}`) {
    setKnown(`${find} ${count}`);
    setCurrent(-1);
  }
  const go = (by: number) => {
    if (count === 0) return;
    const next = current === -1 ? (by > 0 ? 0 : count - 1) : (current + by + count) % count;
    setCurrent(next);
    onGo(next);
  };
  useHotkeys(
    [
      {
        keys: "n",
        label: "Next place of what you look for",
        run: () => {
          go(1);
        },
      },
      {
        keys: "N",
        label: "Previous place of what you look for",
        run: () => {
          go(-1);
        },
      },
    ],
    count > 0,
  );
  return (
    <Group gap={4} wrap="nowrap" data-testid="find">
      <form
        role="search"
        onSubmit={(event) => {
          event.preventDefault();
          go(1);
        }}
      >
        <SearchInput label="Find in this trajectory" value={find} onChange={onFind} w={{ base: 150, sm: 210 }} />
      </form>
      {find !== "" && (
        <>
          <Text size="xs" className="quiet number" role="status" miw={44}>
            {count === 0 ? "nothing" : `${current === -1 ? "" : `${current + 1} of `}${count}`}
          </Text>
          <ActionIcon
            variant="default"
            size="sm"
            aria-label="Previous place (N)"
            onClick={() => {
              go(-1);
            }}
          >
            ↑
          </ActionIcon>
          <ActionIcon
            variant="default"
            size="sm"
            aria-label="Next place (n)"
            onClick={() => {
              go(1);
            }}
          >
            ↓
          </ActionIcon>
        </>
      )}
    </Group>
  );
}
