import { Anchor } from "@mantine/core";
import { Link } from "react-router";
import { EmptyState } from "../ui/states";
import { Page } from "../ui/Page";

export default function NotFoundPage() {
  return (
    <Page title="No such page">
      <EmptyState title="The console has no page with this address">
        <Anchor component={Link} to="/">
          All runs
        </Anchor>
      </EmptyState>
    </Page>
  );
}
