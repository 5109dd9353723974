package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
)

// pinned reads the mutants of a file. Each is a line "FILE: what it breaks", then the
// lines that are taken out, with a minus sign before them, and those that are put in
// their place, with a plus sign. What is taken out has to be there exactly once.
func pinned(path, match string) ([]mutant, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var mutants []mutant
	for block := range strings.SplitSeq(string(text), "\n\n") {
		if block = strings.TrimSpace(block); block == "" || strings.HasPrefix(block, "#") {
			continue
		}
		m, err := parse(block)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if strings.Contains(m.what, match) {
			mutants = append(mutants, m)
		}
	}
	return mutants, nil
}

func parse(block string) (mutant, error) {
	head, body, _ := strings.Cut(block, "\n")
	file, what, found := strings.Cut(head, ": ")
	if !found {
		return mutant{}, fmt.Errorf("%q does not begin with FILE: ", head)
	}
	var out, in strings.Builder
	for line := range strings.SplitSeq(body, "\n") {
		switch {
		case strings.HasPrefix(line, "-"):
			out.WriteString(line[1:] + "\n")
		case strings.HasPrefix(line, "+"):
			in.WriteString(line[1:] + "\n")
		default:
			return mutant{}, fmt.Errorf("%s: %q begins with neither - nor +", head, line)
		}
	}
	source, err := os.ReadFile(file)
	if err != nil {
		return mutant{}, err
	}
	if n := bytes.Count(source, []byte(out.String())); n != 1 {
		return mutant{}, fmt.Errorf("%s: its lines are in the file %d times", head, n)
	}
	return mutant{file, what, bytes.Replace(source, []byte(out.String()), []byte(in.String()), 1)}, nil
}
