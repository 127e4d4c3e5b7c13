import { MantineProvider } from "@mantine/core";
import { Notifications } from "@mantine/notifications";
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { isWorthRetrying } from "../api/errors";
import { HotkeysProvider } from "../ui/hotkeys";
import { resolveVariables, theme } from "./theme";

export function createQueryClient(): QueryClient {
  return new QueryClient({
    defaultOptions: {
      queries: {
        staleTime: 10_000,
        retry: (failures, error) => failures < 2 && isWorthRetrying(error),
      },
    },
  });
}

interface Props {
  children: ReactNode;
  client?: QueryClient;
  /** Leaves out transitions. */
  isTest?: boolean;
}

/** What every page needs around it: theme, queries, keys. Tests render pages in it. */
export function Providers({ children, client, isTest = false }: Props) {
  const [queries] = useState(() => client ?? createQueryClient());
  return (
    <MantineProvider
      env={isTest ? "test" : "default"}
      theme={theme}
      cssVariablesResolver={resolveVariables}
      defaultColorScheme="auto"
    >
      <QueryClientProvider client={queries}>
        <HotkeysProvider>{children}</HotkeysProvider>
      </QueryClientProvider>
      <Notifications position="bottom-right" />
    </MantineProvider>
  );
}
