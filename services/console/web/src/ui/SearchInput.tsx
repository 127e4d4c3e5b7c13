import { TextInput, type TextInputProps } from "@mantine/core";
import { useEffect, useRef, useState } from "react";
import { useHotkeys } from "./hotkeys";

interface Props extends Omit<TextInputProps, "value" | "onChange"> {
  label: string;
  value: string;
  onChange: (value: string) => void;
  /** How long to wait for the next letter before `onChange`. */
  delayMs?: number;
}

/** A field to search in, which `/` goes to. What is typed counts after a pause. */
export function SearchInput({ label, value, onChange, delayMs = 250, ...rest }: Props) {
  const field = useRef<HTMLInputElement>(null);
  const [typed, setTyped] = useState(value);
  const [known, setKnown] = useState(value);
  if (value !== known) {
    setKnown(value);
    setTyped(value);
  }
  useEffect(() => {
    if (typed === value) return undefined;
    const timer = setTimeout(() => {
      onChange(typed);
    }, delayMs);
    return () => {
      clearTimeout(timer);
    };
  }, [typed, value, onChange, delayMs]);
  useHotkeys([{ keys: "/", label, run: () => field.current?.focus() }]);
  return (
    <TextInput
      ref={field}
      type="search"
      size="xs"
      aria-label={label}
      placeholder={`${label} ( / )`}
      value={typed}
      onChange={(event) => {
        setTyped(event.currentTarget.value);
      }}
      onKeyDown={(event) => {
        if (event.key === "Escape") event.currentTarget.blur();
      }}
      {...rest}
    />
  );
}
