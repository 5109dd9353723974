package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strings"
)

// swapped are the operators that are exchanged.
var swapped = map[token.Token]string{
	token.EQL: "!=", token.NEQ: "==",
	token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">",
	token.LAND: "||", token.LOR: "&&",
	token.ADD: "-", token.SUB: "+", token.MUL: "/", token.QUO: "*",
}

// generate makes every mutant of some files: operators exchanged, conditions negated,
// truth values turned round, statements left out.
func generate(files []string) ([]mutant, error) {
	var mutants []mutant
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, file, source, 0)
		if err != nil {
			return nil, err
		}
		at := func(p token.Pos) int { return set.Position(p).Offset }
		change := func(from, to token.Pos, with string) {
			changed := slices.Concat(source[:at(from)], []byte(with), source[at(to):])
			before, _, _ := bytes.Cut(source[at(from):at(to)], []byte("\n"))
			what := fmt.Sprintf("line %d: %s -> %s", set.Position(from).Line, before, strings.TrimSpace(with))
			mutants = append(mutants, mutant{file, what, changed})
		}
		ast.Inspect(parsed, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.BinaryExpr:
				if with, ok := swapped[node.Op]; ok {
					change(node.OpPos, node.OpPos+token.Pos(len(node.Op.String())), with)
				}
			case *ast.IfStmt:
				change(node.Cond.Pos(), node.Cond.End(), "!("+string(source[at(node.Cond.Pos()):at(node.Cond.End())])+")")
			case *ast.Ident:
				if turned := map[string]string{"true": "false", "false": "true"}[node.Name]; turned != "" {
					change(node.Pos(), node.End(), turned)
				}
			case *ast.BlockStmt:
				for _, statement := range node.List {
					if removable(statement) {
						change(statement.Pos(), statement.End(), "")
					}
				}
			}
			return true
		})
	}
	return mutants, nil
}

// removable reports whether code may go on without a statement. Log lines are not
// what tests are for.
func removable(statement ast.Stmt) bool {
	switch s := statement.(type) {
	case *ast.ExprStmt:
		call, ok := s.X.(*ast.CallExpr)
		return ok && !logs(call)
	case *ast.AssignStmt:
		return s.Tok != token.DEFINE
	case *ast.IncDecStmt, *ast.DeferStmt, *ast.GoStmt:
		return true
	}
	return false
}

func logs(call *ast.CallExpr) bool {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	of, ok := selector.X.(*ast.SelectorExpr)
	return ok && of.Sel.Name == "logger"
}
