import { useRouteError } from "react-router";
import { ErrorState } from "../ui/states";

/** Shows an error that a page did not handle: a fault of the console, or a page whose file is gone after an update. */
export function RouteError() {
  const error = useRouteError();
  const isStale = error instanceof TypeError && /import|module/i.test(error.message);
  const remedy = isStale ? "The console was updated: load the page again." : undefined;
  return (
    <ErrorState
      error={error}
      remedy={remedy}
      onRetry={() => {
        window.location.reload();
      }}
    />
  );
}
