// Command mutants checks the tests by breaking what they test. Run it in the root of
// the repository.
//
//	go run ./mutants            every mutant of mutants/pinned.txt has to be noticed
//	go run ./mutants -n 12      twelve of them
//	go run ./mutants -score     a sample of generated ones, and how many were noticed
//
// A mutant is one change of one file, laid over the source with go build's -overlay:
// nothing in the working tree is touched. It is killed when the tests fail, or run
// into their time-out, and survives otherwise; what does not compile does not count.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"
)

// A mutant is a change of one file.
type mutant struct {
	file   string
	what   string
	source []byte // the whole file, changed
}

func main() {
	log.SetFlags(0)
	var (
		score = flag.Bool("score", false, "generate mutants instead of the pinned ones")
		files = flag.String("files", "succession.go,lease.go,candidacy.go,elector.go,candidate.go,leadership.go,committer.go", "-score: the files to change, comma separated")
		n     = flag.Int("n", 120, "how many mutants to try")
		seed  = flag.Uint64("seed", 1, "which ones, where there are more")
		least = flag.Int("least", 70, "-score: the percentage that has to be noticed")
		match = flag.String("match", "", "pinned: only those whose description contains this")
	)
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *score, strings.Split(*files, ","), *n, *seed, *least, *match); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, score bool, files []string, n int, seed uint64, least int, match string) error {
	var (
		mutants []mutant
		err     error
	)
	if score {
		if mutants, err = generate(files); err != nil {
			return err
		}
		fmt.Printf("%d possible mutants, trying until %d have compiled\n", len(mutants), n)
	} else {
		if mutants, err = pinned("mutants/pinned.txt", match); err != nil {
			return err
		}
		n = min(n, len(mutants))
	}
	if n < len(mutants) {
		random := rand.New(rand.NewPCG(seed, 0))
		random.Shuffle(len(mutants), func(i, j int) { mutants[i], mutants[j] = mutants[j], mutants[i] })
	}
	dir, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if killed, err := try(ctx, dir, mutant{}); err != nil {
		return fmt.Errorf("without any change: %w", err)
	} else if killed {
		return errors.New("the tests fail without any change: mend that first")
	}
	tried, survived := 0, 0
	for _, m := range mutants {
		if tried == n {
			break
		}
		killed, err := try(ctx, dir, m)
		switch {
		case errors.Is(err, errBroken) && score:
			continue
		case errors.Is(err, errBroken):
			fmt.Printf("BROKEN    %s: %s: %v\n", m.file, m.what, err)
			tried, survived = tried+1, survived+1
			continue
		case err != nil:
			return fmt.Errorf("%s: %s: %w", m.file, m.what, err)
		}
		tried++
		verdict := "killed"
		if !killed {
			survived++
			verdict = "SURVIVED"
		}
		fmt.Printf("%-8s  %s: %s\n", verdict, m.file, m.what)
	}
	fmt.Printf("%d of %d mutants were noticed (%d %%)\n", tried-survived, tried, 100*(tried-survived)/max(tried, 1))
	switch {
	case !score && survived > 0:
		return fmt.Errorf("%d mutants survived: add the tests that notice them", survived)
	case score && 100*(tried-survived) < least*tried:
		return fmt.Errorf("fewer than %d %% were noticed", least)
	}
	return nil
}

// errBroken is a mutant that does not compile.
var errBroken = errors.New("it does not compile")

// tests are those of the root package that need no external service, the quick ones
// first.
var tests = [][]string{
	{"-test.skip", "^(TestModel|TestSimulation|TestKafka)"},
	{"-test.run", "^(TestModel|TestSimulation)"},
}

// try reports whether the tests notice a mutant; the zero mutant is no change.
func try(ctx context.Context, dir string, m mutant) (killed bool, err error) {
	args := []string{"test", "-c", "-vet=off", "-o", filepath.Join(dir, "mutant.test")}
	if m.file != "" {
		overlay, err := lay(dir, m)
		if err != nil {
			return false, err
		}
		args = append(args, "-overlay", overlay)
	}
	var output bytes.Buffer
	build := exec.CommandContext(ctx, "go", append(args, ".")...)
	build.Stderr = &output
	if err := build.Run(); err != nil {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		return false, fmt.Errorf("%w: %s", errBroken, output.String())
	}
	for _, which := range tests {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
		test := exec.CommandContext(ctx, filepath.Join(dir, "mutant.test"), append(which, "-test.failfast", "-test.timeout", "60s")...)
		err := test.Run()
		cancel()
		if failure := new(exec.ExitError); errors.As(err, &failure) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}

// lay writes the file that tells the compiler to take the changed source.
func lay(dir string, m mutant) (string, error) {
	original, err := filepath.Abs(m.file)
	if err != nil {
		return "", err
	}
	changed := filepath.Join(dir, "mutant.go")
	if err := os.WriteFile(changed, m.source, 0o600); err != nil {
		return "", err
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {original: changed}})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, overlay, 0o600)
}
