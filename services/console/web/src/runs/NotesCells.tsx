// Note and tags of a run, changed where they are shown.
import { Badge, Group, TagsInput, Text, Textarea, UnstyledButton } from "@mantine/core";
import { useState } from "react";
import type { Run } from "./list";
import { useWriteNotes } from "./notes";

export function NoteCell({ run }: { run: Run }) {
  const [draft, setDraft] = useState<string | null>(null);
  const write = useWriteNotes(run.id);
  const { note } = run.notes;
  if (draft === null) {
    return (
      <UnstyledButton
        onClick={() => {
          setDraft(note);
        }}
        aria-label={note === "" ? `+ note on ${run.id}` : `Change the note of ${run.id}: ${note}`}
        title={note === "" ? "Add a note" : note}
        w="100%"
        miw={110}
      >
        <Text size="sm" lineClamp={2} c={note === "" ? "dimmed" : undefined} style={{ overflowWrap: "anywhere" }}>
          {note === "" ? "+ note" : note}
        </Text>
      </UnstyledButton>
    );
  }
  const save = () => {
    setDraft(null);
    if (draft !== note) write({ note: draft });
  };
  return (
    <Textarea
      ref={(field) => {
        if (field && document.activeElement !== field) field.focus();
      }}
      size="xs"
      autosize
      maxRows={8}
      maxLength={10_000}
      aria-label={`Note of ${run.id}; Escape leaves it as it was`}
      value={draft}
      onChange={(event) => {
        setDraft(event.currentTarget.value);
      }}
      onBlur={save}
      onKeyDown={(event) => {
        if (event.key === "Escape") setDraft(null);
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      }}
    />
  );
}

interface TagsProps {
  run: Run;
  /** Tags of other runs, to choose from. */
  known: string[];
  onChoose: (tag: string) => void;
}

export function TagsCell({ run, known, onChoose }: TagsProps) {
  const [draft, setDraft] = useState<string[] | null>(null);
  const write = useWriteNotes(run.id);
  const { tags } = run.notes;
  if (draft === null) {
    return (
      <Group gap={4} miw={70}>
        {tags.map((tag) => (
          <UnstyledButton
            key={tag}
            aria-label={`Show the runs with the tag ${tag}`}
            onClick={() => {
              onChoose(tag);
            }}
          >
            <Badge variant="default" size="sm" style={{ cursor: "inherit" }}>
              {tag}
            </Badge>
          </UnstyledButton>
        ))}
        <UnstyledButton
          c="dimmed"
          fz="sm"
          aria-label={`+ tag: change the tags of ${run.id}`}
          onClick={() => {
            setDraft(tags);
          }}
        >
          + tag
        </UnstyledButton>
      </Group>
    );
  }
  const save = () => {
    setDraft(null);
    const cleaned = [...new Set(draft.map((tag) => tag.trim()).filter((tag) => tag !== ""))];
    if (JSON.stringify(cleaned) !== JSON.stringify(tags)) write({ tags: cleaned });
  };
  return (
    <TagsInput
      ref={(field) => {
        if (field && document.activeElement !== field) field.focus();
      }}
      size="xs"
      data={known}
      value={draft}
      onChange={setDraft}
      onBlur={save}
      acceptValueOnBlur
      maxTags={20}
      maxLength={40}
      aria-label={`Tags of ${run.id}; Escape leaves them as they were`}
      onKeyDown={(event) => {
        if (event.key === "Escape") setDraft(null);
      }}
    />
  );
}
