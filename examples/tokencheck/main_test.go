package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDeposedLeaderIsTurnedAway(t *testing.T) { require.NoError(t, run("")) }
