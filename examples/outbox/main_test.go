package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNothingIsLostOrDoubledUnderFailover(t *testing.T) { require.NoError(t, run("")) }
