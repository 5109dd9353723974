package main

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOldFencingNumberChangesNothing(t *testing.T) {
	ctx := context.Background()
	ledger, err := OpenLedger(filepath.Join(t.TempDir(), "ledger.db"))
	require.NoError(t, err)
	defer ledger.Close()
	require.NoError(t, ledger.Add(ctx, 4, "alice", 100))
	require.NoError(t, ledger.Add(ctx, 4, "alice", 1), "the same leader goes on")
	require.NoError(t, ledger.Add(ctx, 9, "alice", 10), "a newer one takes over")
	require.ErrorIs(t, ledger.Add(ctx, 4, "alice", 1000), ErrStale)
	balance, err := ledger.Balance(ctx, "alice")
	require.NoError(t, err)
	require.EqualValues(t, 111, balance)
	require.NoError(t, ledger.Add(ctx, 4, "bob", 5), "a row is fenced by who wrote it: guard all rows of a decision alike")
}

func TestZombieIsRefusedByTheDatabase(t *testing.T) { require.NoError(t, run("")) }
