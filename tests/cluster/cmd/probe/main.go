// Command probe is the only program of the image that the cluster's own tests
// run. `probe serve PORT` answers every path with the host's name and `/healthz`
// with ok; `probe get [-token] URL...` prints what it fetches, with the pod's
// service account token if told so; `probe sleep` waits for SIGTERM; `probe eat`
// takes all the memory it can get.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	if len(os.Args) < 2 {
		check(errors.New("usage: probe serve PORT | get [-token] URL... | sleep | eat"))
	}
	switch os.Args[1] {
	case "serve":
		serve(os.Args[2])
	case "get":
		get(os.Args[2:])
	case "eat":
		eat()
	case "sleep":
		<-stopped().Done()
	default:
		check(fmt.Errorf("unknown command %q", os.Args[1]))
	}
}

func serve(port string) {
	name, err := os.Hostname()
	check(err)
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, name) })
	http.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	server := http.Server{Addr: ":" + port}
	context.AfterFunc(stopped(), func() { server.Close() })
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		check(err)
	}
}

func get(arguments []string) {
	flags := flag.NewFlagSet("get", flag.ExitOnError)
	useToken := flags.Bool("token", false, "authenticate as the pod's service account")
	check(flags.Parse(arguments))
	token, pool := "", x509.NewCertPool()
	if *useToken {
		data, err := os.ReadFile(account + "token")
		check(err)
		token = string(data)
		data, err = os.ReadFile(account + "ca.crt")
		check(err)
		pool.AppendCertsFromPEM(data)
	}
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	for _, url := range flags.Args() {
		request, err := http.NewRequest(http.MethodGet, url, nil)
		check(err)
		if token != "" {
			request.Header.Set("Authorization", "Bearer "+token)
		}
		response, err := client.Do(request)
		check(err)
		body, err := io.ReadAll(response.Body)
		check(err)
		check(response.Body.Close())
		fmt.Printf("%s %d %.80s\n", url, response.StatusCode, body)
	}
}

func eat() {
	var eaten [][]byte
	for {
		piece := make([]byte, 1<<20)
		for i := 0; i < len(piece); i += os.Getpagesize() {
			piece[i] = 1
		}
		eaten = append(eaten, piece)
	}
}

// stopped is done when the process is told to end.
func stopped() context.Context {
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	return ctx
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}
